"""Rules that cannot act on a task's requests are named, with the reason; the others are not."""

import pytest

from stepsaver.engine.positions import BOTH, SELF
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.evaluation.inert import ScoredLengths, acting_rules, inert_rules, most_steps

ONE_TOKEN = [ScoredLengths(500, 1), ScoredLengths(31, 1), ScoredLengths(32, 1)]
SEVERAL = [*ONE_TOKEN, ScoredLengths(40, 5)]
RULES = tuple(parse_rule(text) for text in ("layer_reuse:k=3,mode=output", "layer_reuse:k=1", "trim", "window"))


@pytest.mark.parametrize(
    ("context", "continuation", "steps"),
    [
        (40, 1, 1),
        (40, 5, 5),
        (32, 1, 0),  # scored by the prefill
        (32, 2, 1),
        (31, 2, 1),  # one row in either block, and the second is the first of its block
        (31, 3, 1),
        (30, 4, 2),
        (63, 34, 31),
        (0, 1, 1),  # behind one bos token
        (40, 0, 0),
    ],
)
def test_most_steps(context: int, continuation: int, steps: int) -> None:
    assert most_steps(ScoredLengths(context, continuation), block_size=32) == steps


@pytest.mark.parametrize(
    ("context", "continuation", "steps"), [(40, 1, 1), (32, 1, 1), (32, 2, 2), (31, 2, 1), (31, 3, 2), (63, 34, 32)]
)
def test_rows_that_predict_their_own_token_are_all_revealed_by_steps(
    context: int, continuation: int, steps: int
) -> None:
    assert most_steps(ScoredLengths(context, continuation), block_size=32, prediction=SELF) == steps
    two_at_a_boundary = [ScoredLengths(32, 2)]
    assert len(inert_rules(RULES, two_at_a_boundary, block_size=32)) == len(RULES)
    (only,) = inert_rules(RULES, two_at_a_boundary, block_size=32, prediction=SELF)
    assert "k=1" in only.reason


@pytest.mark.parametrize(("context", "continuation", "steps"), [(40, 1, 0), (63, 34, 31), (7, 32, 31), (0, 3, 2)])
def test_after_a_causal_context_blocks_start_right_behind_it(context: int, continuation: int, steps: int) -> None:
    assert most_steps(ScoredLengths(context, continuation), block_size=32, prediction=BOTH) == steps


def test_a_scored_stop_token_is_one_row_more() -> None:
    assert most_steps(ScoredLengths(40, 1), block_size=32, score_stop=True) == 2


def test_one_token_requests_make_every_rule_inert() -> None:
    found = inert_rules(RULES, ONE_TOKEN, block_size=32)
    assert len(found) == len(RULES)
    assert all("no request can take two steps" in each.reason for each in found)
    assert len(inert_rules(RULES, ONE_TOKEN, block_size=32, score_stop=True)) == 1


def test_longer_requests_leave_only_k1_inert() -> None:
    (found,) = inert_rules(RULES, SEVERAL, block_size=32)
    assert found.rule.startswith("layer_reuse:k=1")
    assert found.reason == "k=1 computes every step"


def test_the_reference_estimator_makes_every_rule_inert() -> None:
    found = inert_rules(RULES, SEVERAL, block_size=32, estimator="reference")
    assert len(found) == len(RULES)
    assert all("reference estimator" in each.reason for each in found)


def test_configs_with_the_same_acting_rules_are_equal() -> None:
    inert = inert_rules(RULES, SEVERAL, block_size=32)
    assert acting_rules(RULES, inert) == (RULES[0], RULES[2], RULES[3])
    assert acting_rules(RULES, inert_rules(RULES, ONE_TOKEN, block_size=32)) == ()


def test_no_rules_no_remarks() -> None:
    assert inert_rules((), ONE_TOKEN, block_size=32) == ()


def test_a_threshold_of_zero_calls_no_row_calm() -> None:
    (found,) = inert_rules((parse_rule("adaptive_layers:threshold=0"),), SEVERAL, block_size=32)
    assert "threshold=0" in found.reason
