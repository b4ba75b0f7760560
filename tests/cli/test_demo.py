"""The sentence at the end of the demonstration: made from the figures, whatever they are."""

from stepsaver.bench.experiment import Condition, ConfigSpec
from stepsaver.bench.folders import find_experiment
from stepsaver.bench.statistics import Interval
from stepsaver.bench.verdict import ConfigVerdict
from stepsaver.commands.demo import WAYS_THAT_PAY, advice, ways_that_pay

WANTED = Condition.parse("< 5")
CONFIGS = [ConfigSpec(name="near", rules=("trim", "suffix_dropout")), ConfigSpec(name="drafts", policy="fixed:rows=2")]


def judged(config: str, up: float, drop: float, *, width: float = 0.1) -> ConfigVerdict:
    speed_up = Interval(up, up - width, up + width)
    return ConfigVerdict(config, "undecided", "", speed_up, Interval(drop, drop - 1, drop + 1), "baseline", None)


def test_the_fastest_that_holds_the_bound_is_named_with_its_settings_and_figures() -> None:
    grid = [judged("k2_first", 1.05, 1.0, width=0.02), judged("k3_last", 3.0, 40.0)]
    sentence = advice(grid, [judged("near", 1.6, 0.4), judged("drafts", 1.5, 0.0)], WANTED, CONFIGS)
    assert sentence == (
        "Use near (trim, suffix_dropout): 1.60x [1.50, 1.70] at a drop of 0.4 [-0.6, 1.4] points "
        "against the same baseline; "
        "the best of the grid is k2_first, 1.05x [1.03, 1.07] at a drop of 1.0 [0.0, 2.0] points."
    )
    sentence = advice(grid, [judged("near", 1.6, 4.5), judged("drafts", 1.5, 0.0)], WANTED, CONFIGS)
    assert sentence.startswith("Use drafts (fixed:rows=2): 1.50x")


def test_other_figures_lead_to_other_advice() -> None:
    slow = [judged("near", 1.05, 0.0)]  # its interval reaches below 1
    assert advice([judged("k3_last", 3.0, 40.0)], slow, WANTED, CONFIGS).startswith("Use no reuse: nothing was surely")
    sentence = advice([judged("k3_last", 3.0, 40.0)], [judged("near", 1.5, 0.0)], WANTED, CONFIGS)
    assert sentence.endswith("of the grid nothing is surely faster at a drop < 5 points.")
    sentence = advice([judged("k2_first", 1.9, 0.0)], [judged("near", 1.5, 0.0)], WANTED, CONFIGS)
    assert sentence.startswith("Use k2_first: 1.90x")
    assert sentence.endswith("no other way was faster.")


def test_the_ways_that_pay_are_those_of_the_experiments_against_the_grids_baseline() -> None:
    grid = find_experiment("00_baseline")
    better = ways_that_pay(grid)
    assert [each.name for each in better.configs] == ["k1_first", *(config for _, config in WAYS_THAT_PAY)]
    assert {better.baseline_of(each.name) for each in better.configs} == {"k1_first"}
    assert all(better.success_of(each.name) == grid.spec.success for each in better.configs)
    names = [rule.name for rule in better.config("window_trim_near_light").parsed_rules()]
    assert names == ["window", "trim", "suffix_dropout", "partial_commit"]
