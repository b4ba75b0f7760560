"""Intervals and verdicts against cases whose answer is known."""

from typing import Any

import numpy as np
import pytest

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Condition, Criterion, Success
from stepsaver.bench.statistics import bootstrap_p, holm, median_interval, paired_drop, share_interval
from stepsaver.bench.timings import chunk_pairs, confirmation_p, speed_ups
from stepsaver.bench.verdict import is_control, judge
from tests.bench import made_up
from tests.bench.made_up import timing

SUCCESS = Success(
    confirm_if=Criterion(speed_up="> 1.2", drop_points="< 5"),  # type: ignore[arg-type]
    reject_if=Criterion(speed_up="< 1.05", drop_points="> 20"),  # type: ignore[arg-type]
)


def test_wilson_interval_is_the_textbooks() -> None:
    interval = share_interval(80, 100)
    assert (interval.low, interval.high) == pytest.approx((0.7112, 0.8666), abs=1e-4)


def test_median_intervals_cover_the_median() -> None:
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        interval = median_interval(generator.lognormal(0.2, 0.1, 15))
        covered += interval.low <= np.exp(0.2) <= interval.high
    assert covered / 200 > 0.88


def test_paired_drop_counts_what_was_lost_and_won() -> None:
    baseline = [1.0] * 60 + [0.0] * 40
    values = [0.0] * 10 + [1.0] * 50 + [1.0] * 2 + [0.0] * 38
    drop = paired_drop(baseline, values)
    assert (drop.lost, drop.won) == (10, 2)
    assert drop.drop.value == pytest.approx(0.08)
    assert drop.drop.low < 0.08 < drop.drop.high
    assert drop.p_value == pytest.approx(0.0386, abs=1e-3)
    assert paired_drop(baseline, baseline).p_value == 1.0


def test_holm_stops_at_the_first_that_falls() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a"}
    assert holm({"a": 0.01, "b": 0.02, "c": 0.04}) == {"a", "b", "c"}


def test_bootstrap_p_is_small_on_the_wanted_side_only() -> None:
    values = list(np.random.default_rng(2).normal(1.5, 0.05, 30))
    assert bootstrap_p(values, 1.2, statistic="median", above=True) < 0.001
    assert bootstrap_p(values, 1.6, statistic="median", above=True) > 0.9


def test_speed_ups_pair_chunks_of_one_session_only() -> None:
    ours = [timing(chunk, session=session) for chunk, session in enumerate("aab")]
    base = [timing(chunk, session=session, seconds=2.0) for chunk, session in enumerate("abb")]
    base[2] = base[2].model_copy(update={"tokens": 50})
    pairs = chunk_pairs(ours, base)
    assert [(pair[0].chunk, pair[1].session) for pair in pairs] == [(0, "a"), (2, "b")]
    ratios = speed_ups(pairs)
    assert ratios["tokens_per_s"] == [2.0, 4.0]
    assert ratios["seconds_per_sample"] == [2.0, 2.0]


def summary(
    name: str,
    up: tuple,
    drop: tuple,
    *,
    chunks: int = 20,
    p: float = 0.001,
    other: tuple = (9, 9, 9),
    **changes: Any,
) -> Summary:
    paired = made_up.SUMMARY["paired"] | {"drop_points": drop} | changes.pop("paired", {})
    return made_up.summary(
        config=name,
        speed_up={"tokens_per_s": up, "seconds_per_sample": other},
        paired=paired,
        speed_up_chunks=chunks,
        confirmation_p=p,
        **changes,
    )


@pytest.mark.parametrize(
    ("cell", "outcome"),
    [
        (summary("fast", (1.5, 1.4, 1.6), (1, 0, 2)), "confirmed"),
        (summary("fast", (1.5, 1.4, 1.6), (1, 0, 2), chunks=7), "undecided"),
        (summary("fast", (1.5, 1.4, 1.6), (1, 0, 2), p=0.2), "undecided"),
        (summary("garbage", (1.5, 1.4, 1.6), (1, 0, 2), other=(0.9, 0.8, 1.0)), "rejected"),
        (summary("slow", (0.9, 0.8, 1.0), (1, 0, 2)), "rejected"),
        (summary("bad", (1.5, 1.4, 1.6), (30, 25, 35)), "rejected"),
        (summary("worse", (1.5, 1.4, 1.6), (8, 6, 10)), "rejected"),
        (summary("wide", (1.25, 1.1, 1.4), (1, 0, 2)), "undecided"),
    ],
)
def test_verdicts_stand_on_the_intervals(cell: Summary, outcome: str) -> None:
    verdict = judge([cell], lambda _: SUCCESS)
    assert verdict.outcome == outcome
    assert cell.config in verdict.sentence


def test_one_confirmed_config_confirms_and_undecided_says_how_many_samples() -> None:
    fast, wide = summary("fast", (1.5, 1.4, 1.6), (1, 0, 2)), summary("wide", (1.25, 1.1, 1.4), (1, 0, 2))
    assert judge([fast, wide], lambda _: SUCCESS).outcome == "confirmed"
    assert "about 800 more samples" in judge([wide], lambda _: SUCCESS).sentence


def test_a_config_that_does_the_work_of_the_baseline_is_no_speed_up_however_its_timings_fell() -> None:
    lucky = control()
    only = judge([lucky], lambda _: SUCCESS)
    assert (only.outcome, [each.outcome for each in only.configs]) == ("undecided", ["control"])
    slow = summary("slow", (0.9, 0.8, 1.0), (1, 0, 2))
    beside = judge([lucky, slow], lambda _: SUCCESS)
    assert (beside.outcome, [each.outcome for each in beside.configs]) == ("rejected", ["control", "rejected"])
    assert "slow" in beside.sentence, "the fastest of those that were tried, not of the controls"


def control(**changes: Any) -> Summary:
    """A config that does the baseline's work, such as k = 1, in a lucky hour."""
    same = {"predicted_speed_up": 1.0, "ceiling": 1.0, "paired": {"lost": 0, "won": 0}}
    same |= {"unlike_baseline": ["rules"], "different_answers": 0}
    return summary("k1", (1.5, 1.4, 1.6), (0, 0, 0), **same | changes)


@pytest.mark.parametrize(
    "difference",
    [
        {"predicted_speed_up": 1.02},
        {"ceiling": 1.5},
        {"different_answers": 1},
        {"unlike_baseline": ["policy", "rules"]},
        {"unlike_baseline": ["decoding"]},
        {"unlike_baseline": None, "different_answers": None, "paired": {"lost": 1, "won": 1}},
    ],
    ids=str,
)
def test_the_same_work_with_any_other_difference_is_no_control(difference: dict[str, Any]) -> None:
    assert is_control(control())
    assert is_control(control(unlike_baseline=None, different_answers=None)), "of a version that did not store it"
    assert not is_control(control(**difference))
    assert judge([control(**difference)], lambda _: SUCCESS).outcome == "confirmed"


def test_confirmation_needs_every_bound() -> None:
    wanted = Criterion(speed_up=Condition.parse("> 1.2"), drop_points=Condition.parse("< 5"))
    good, bad = [1.5] * 20, [1.1] * 20
    assert confirmation_p({"a": good, "b": good}, [0.0] * 100, wanted) < 0.01
    assert confirmation_p({"a": good, "b": bad}, [0.0] * 100, wanted) > 0.9
    assert confirmation_p({"a": good, "b": good}, [1.0, 0.0] * 50, wanted) > 0.9
    assert confirmation_p({"a": [], "b": []}, [0.0], wanted) == 1.0
