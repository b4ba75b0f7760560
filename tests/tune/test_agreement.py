"""Agreement with plain decoding, where there are no labels."""

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestKey, RequestRecord
from stepsaver.tune.agreement import agreement, answer_pattern, how_compared


def answer(text: str, ids: tuple[int, ...] = ()) -> RequestRecord:
    return RequestRecord(RequestKey("t", 0, 0, 0), "generation", "", 1, 0, ids, text)


@pytest.mark.parametrize(
    ("pattern", "ours", "plain", "expected"),
    [
        (r"#### (\d+)", "1 + 2\n#### 3", "2 + 1\n#### 3", 1.0),
        (r"#### (\d+)", "#### 3", "#### 33", 0.0),
        (r"\d+", "so 3, then 4", "first 5, then 4", 1.0),
        (r"#### (\d+)", "nothing", "nothing", 1.0),
        (r"#### (\d+)", "nothing", "something", 0.0),
        (r"#### (\d+)", "nothing", "#### 3", 0.0),
    ],
)
def test_the_same_last_answer(pattern: str, ours: str, plain: str, expected: float) -> None:
    assert agreement(answer(ours, (1,)), answer(plain, (2,)), answer_pattern(pattern)) == expected


def test_without_a_pattern_the_same_text_or_the_share_of_equal_tokens() -> None:
    assert agreement(answer("a b", (1, 2)), answer("a b", (1, 2)), None) == 1.0
    assert agreement(answer("a b c d", (1, 2, 3, 4)), answer("a x c", (1, 9, 3)), None) == 0.5
    assert "share of equal tokens" in how_compared(None)
    assert "####" in how_compared(answer_pattern("####"))


def test_a_wrong_pattern_is_one_line() -> None:
    with pytest.raises(UsageError, match="no regular expression"):
        answer_pattern("(")
