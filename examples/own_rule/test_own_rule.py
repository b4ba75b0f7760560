from own_rule import RestingRows

from stepsaver.extending import check_rule


def test_it_is_checked_as_the_rules_of_stepsaver_are() -> None:
    assert check_rule(RestingRows()) > check_rule(RestingRows(after=3)) > 0.05
