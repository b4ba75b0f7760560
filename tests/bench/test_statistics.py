"""Intervals and tests against published values and scipy's, verdicts on both sides of every bound."""

from bisect import bisect
from math import nan
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Criterion, Success
from stepsaver.bench.statistics import bootstrap_p, holm, median_interval, paired_drop, share_interval
from stepsaver.bench.timings import chunk_pairs, confirmation_p, speed_ups
from stepsaver.bench.verdict import judge
from tests.bench import made_up
from tests.bench.made_up import timing

SUCCESS = Success(
    confirm_if=Criterion(speed_up="> 1.2", drop_points="< 5"),  # type: ignore[arg-type]
    reject_if=Criterion(speed_up="< 1.05", drop_points="> 20"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_an_interval_of_a_share_is_the_published_one(right: int, count: int, low: float, high: float) -> None:
    assert share_interval(right, count) == pytest.approx((right / count, low, high), abs=5e-5)
    for other in (right, count - right):
        expected = binomtest(other, count).proportion_ci(method="wilson")
        assert share_interval(other, count)[1:] == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_shares_of_nothing_and_of_partial_credit() -> None:
    assert share_interval(0, 0) == (pytest.approx(nan, nan_ok=True), 0.0, 1.0)
    assert share_interval(7.4, 10) == (0.74, *share_interval(7, 10)[1:])


def test_an_interval_of_a_median_holds_95_percent_of_what_resampling_gives() -> None:
    """The median of resampled ranks is at most r with the chance that a binomial number is above half."""
    count = 101
    at_most = [float(binom.sf(count // 2, count, (rank + 1) / count)) for rank in range(count)]
    expected = [bisect(at_most, 0.025), count // 2, bisect(at_most, 0.975)]
    found = median_interval(range(count))
    assert (found.low, found.value, found.high) == pytest.approx(expected, abs=1)
    assert bisect(at_most, 0.05) > expected[0] + 1, "90 % would be seen"
    assert median_interval([3.0]) == (3.0, 3.0, 3.0)
    assert np.isnan(median_interval([])).all()


def test_a_paired_drop_counts_what_was_lost_and_won() -> None:
    baseline = [1.0] * 600 + [0.0] * 400
    values = [0.0] * 100 + [1.0] * 500 + [1.0] * 20 + [0.0] * 380
    drop = paired_drop(baseline, values)
    assert (drop.lost, drop.won) == (100, 20)
    deviation = float(np.std(np.subtract(baseline, values))) / 1000**0.5
    expected = [0.08, 0.08 - 1.96 * deviation, 0.08 + 1.96 * deviation]
    assert list(drop.drop) == pytest.approx(expected, abs=0.1 * deviation)


@pytest.mark.parametrize(
    ("lost", "won", "p_value"),
    [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (6, 0, 2 / 64), (1, 1, 1.0), (0, 0, 1.0)],
)
def test_mcnemars_exact_test(lost: int, won: int, p_value: float) -> None:
    drop = paired_drop([1.0] * lost + [0.0] * won + [1.0], [0.0] * lost + [1.0] * won + [1.0])
    assert drop.p_value == pytest.approx(p_value)


def test_a_drop_of_no_sample_is_unknown() -> None:
    drop = paired_drop([], [])
    assert np.isnan(drop.drop).all()
    assert drop[1:] == (0, 0, 1.0)


@pytest.mark.parametrize(
    ("p_values", "standing"),
    [
        ((0.01, 0.04, 0.03, 0.005), "ad"),  # the example of the literature
        ((0.01, 0.04, 0.03), "a"),
        ((0.01, 0.02, 0.04), "abc"),
        ((0.05,), "a"),
        ((0.051,), ""),
        ((0.025, 0.06), "a"),
        ((0.026, 0.001), "ab"),
        ((0.026, 0.026), ""),
        ((), ""),
    ],
)
def test_holms_correction(p_values: tuple[float, ...], standing: str) -> None:
    assert holm(dict(zip("abcd", p_values, strict=False))) == set(standing)


SKEWED = [1.0] * 12 + [9.0] * 8  # the median is 1, the mean 4.2


@pytest.mark.parametrize(
    ("values", "bound", "statistic", "above", "low", "high"),
    [
        ([1.5] * 9, 1.2, "median", True, 1 / 2001, 1 / 2001),  # never zero
        ([1.5] * 9, 1.5, "median", True, 1.0, 1.0),  # on the bound is not above it
        ([1.5] * 9, 1.5, "mean", False, 1.0, 1.0),
        ([1.5] * 9, 1.6, "mean", False, 1 / 2001, 1 / 2001),
        ([1.5] * 9, 1.6, "median", True, 1.0, 1.0),
        (SKEWED, 2.0, "mean", True, 0.0, 0.02),
        (SKEWED, 2.0, "median", True, 0.7, 0.9),  # 12 or more of 20 are ones, and 10 and 11 make 5
        (SKEWED, 4.2, "mean", True, 0.45, 0.6),
    ],
)
def test_how_often_a_resample_misses_a_bound(
    values: list[float], bound: float, statistic: str, above: bool, low: float, high: float
) -> None:
    assert low <= bootstrap_p(values, bound, statistic=statistic, above=above) <= high


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


UP, DROP = (1.5, 1.4, 1.6), (1, 0, 2)


@pytest.mark.parametrize(
    ("cell", "outcome", "reason"),
    [
        (summary("fast", UP, DROP), "confirmed", "both bounds hold on the intervals"),
        (summary("just", (1.5, 1.201, 1.6), (1, 0, 4.999)), "confirmed", "both bounds hold"),
        (summary("eight", UP, DROP, chunks=8), "confirmed", "both bounds hold"),
        (summary("seven", UP, DROP, chunks=7), "undecided", "only 7 of at least 8 chunks are timed"),
        (summary("one of many", UP, DROP, p=0.051), "undecided", "not after correcting for all configs"),
        (summary("on a bound", (1.5, 1.2, 1.6), DROP), "undecided", "about 0 more samples"),
        (summary("on the other", UP, (1, 0, 5)), "undecided", "about 0 more samples"),
        (summary("wide", (1.25, 1.1, 1.4), DROP), "undecided", "about 800 more samples"),
        (summary("dear", UP, (3, 1, 7)), "undecided", "about 300 more samples"),
        (summary("at it", (1.2, 1.1, 1.3), DROP), "undecided", "a value lies on its bound > 1.2"),
        (summary("garbage", UP, DROP, other=(0.9, 0.8, 1.0)), "rejected", "the speed-up is < 1.05 on its interval"),
        (summary("slow", (0.9, 0.8, 1.049), DROP), "rejected", "the speed-up is < 1.05 on its interval"),
        (summary("no faster", (0.9, 0.8, 1.05), DROP), "rejected", "the speed-up is not > 1.2 on its interval"),
        (summary("not it", (1.1, 1.0, 1.2), DROP), "rejected", "the speed-up is not > 1.2 on its interval"),
        (summary("maybe", (1.1, 1.0, 1.201), DROP), "undecided", "more samples"),
        (summary("bad", UP, (30, 20.1, 35)), "rejected", "the drop is > 20 points on its interval"),
        (summary("worse", UP, (30, 20, 35)), "rejected", "the drop is not < 5 points on its interval"),
        (summary("dearer", UP, (8, 5, 10)), "rejected", "the drop is not < 5 points on its interval"),
        (summary("hardly", UP, (8, 4.9, 10)), "undecided", "more samples"),
        (summary("apart", (nan, nan, nan), DROP), "undecided", "no chunk was timed beside the baseline"),
        (summary("shared", (nan,) * 3, DROP, chunks_not_comparable=1), "undecided", "by shards that shared a machine"),
    ],
    ids=lambda each: each.config if isinstance(each, Summary) else "",
)
def test_verdicts_stand_on_the_intervals(cell: Summary, outcome: str, reason: str) -> None:
    verdict = judge([cell], lambda _: SUCCESS)
    assert (verdict.outcome, verdict.configs[0].outcome) == (outcome, outcome)
    assert reason in verdict.configs[0].reason
    assert cell.config in verdict.sentence


MEASURED = Success(
    confirm_if=Criterion(speed_up="> 1.2 measured", drop_points="< 5 measured"),  # type: ignore[arg-type]
    reject_if=Criterion(speed_up="< 1.05 measured", drop_points="> 20"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(
    ("up", "drop", "outcome", "reason"),
    [
        (1.21, 4.9, "confirmed", "the speed-up is > 1.2 as measured, the drop < 5 as measured"),
        (1.2, 4.9, "rejected", "the speed-up is not > 1.2 as measured"),
        (1.04, 4.9, "rejected", "the speed-up is < 1.05 as measured"),
        (1.21, 5.0, "rejected", "the drop is not < 5 points as measured"),
    ],
)
def test_bounds_on_what_was_measured_ask_no_interval(up: float, drop: float, outcome: str, reason: str) -> None:
    cell = summary("wide", (up, 0.5, 3.0), (drop, -50, 50))
    (judged,) = judge([cell], lambda _: MEASURED).configs
    assert (judged.outcome, judged.reason) == (outcome, reason)


def test_one_confirmed_config_confirms_and_only_all_rejected_ones_reject() -> None:
    fast, faster = summary("fast", UP, DROP), summary("faster", (1.7, 1.6, 1.8), DROP, other=(2, 1.9, 2.1))
    wide, slow = summary("wide", (1.25, 1.1, 1.4), DROP), summary("slow", (0.9, 0.8, 1.0), DROP)
    slower = summary("slower", (0.7, 0.6, 0.8), DROP)
    for cells, expected in (
        ([wide, fast, slow], "Confirmed by fast: 1.50x [1.40, 1.60] at a drop of 1.0 [0.0, 2.0] points."),
        ([fast, faster], "Confirmed by faster: 1.70x [1.60, 1.80] at a drop of 1.0 [0.0, 2.0] points."),
        ([slower, slow], "Rejected: no config holds; the fastest is slow, 0.90x [0.80, 1.00] at a drop"),
        ([slow, wide], "Undecided: wide: about 800 more samples would decide it (1.25x [1.10, 1.40] at a drop"),
        ([], "Undecided: no config beside the baseline has results."),
    ):
        assert judge(cells, lambda _: SUCCESS).sentence.startswith(expected)


def test_with_several_baselines_the_hypothesis_has_to_hold_against_each() -> None:
    fast, wide, slow = (
        summary(name, up, DROP, baseline=f"base {name}")
        for name, up in (("fast", UP), ("wide", (1.25, 1.1, 1.4)), ("slow", (0.9, 0.8, 1.0)))
    )
    more = summary("more", UP, DROP, baseline="base more")
    assert judge([fast, more], lambda _: SUCCESS).outcome == "confirmed"
    assert judge([fast, wide], lambda _: SUCCESS).outcome == "undecided"
    both = judge([fast, wide, slow], lambda _: SUCCESS)
    assert both.outcome == "rejected"
    assert both.sentence.startswith("Rejected. Against base fast: Confirmed by fast: ")
    assert "Against base wide: Undecided: " in both.sentence
    assert [each.config for each in both.configs] == ["fast", "wide", "slow"]


def test_a_config_that_does_the_work_of_the_baseline_is_no_speed_up_however_its_timings_fell() -> None:
    lucky = control()
    only = judge([lucky], lambda _: SUCCESS)
    assert (only.outcome, [each.outcome for each in only.configs]) == ("undecided", ["control"])
    slow = summary("slow", (0.9, 0.8, 1.0), (1, 0, 2))
    beside = judge([lucky, slow], lambda _: SUCCESS)
    assert (beside.outcome, [each.outcome for each in beside.configs]) == ("rejected", ["control", "rejected"])
    assert "slow" in beside.sentence, "the fastest of those that were tried, not of the controls"


def control() -> Summary:
    """A config that does the baseline's work, such as k = 1, in a lucky hour."""
    return summary("k1", (1.5, 1.4, 1.6), (0, 0, 0), is_control=True)


GOOD, BAD = [1.5] * 20, [1.1] * 20


@pytest.mark.parametrize(
    ("ratios", "drops", "success", "low", "high"),
    [
        ([GOOD, GOOD], [0.0] * 100, SUCCESS, 1 / 2001, 1 / 2001),
        ([GOOD, BAD], [0.0] * 100, SUCCESS, 1.0, 1.0),
        ([BAD, GOOD], [0.0] * 100, SUCCESS, 1.0, 1.0),
        ([GOOD, GOOD], [1.0, 0.0] * 50, SUCCESS, 1.0, 1.0),
        ([GOOD, GOOD], [0.051] * 100, SUCCESS, 1.0, 1.0),  # points, not shares
        ([GOOD, GOOD], [0.049] * 100, SUCCESS, 1 / 2001, 1 / 2001),
        ([GOOD, []], [0.0], SUCCESS, 1.0, 1.0),
        ([GOOD, GOOD], [], SUCCESS, 1.0, 1.0),
        ([BAD, BAD], [1.0] * 9, MEASURED, 0.0, 0.0),
    ],
)
def test_confirmation_needs_every_bound(ratios: list, drops: list, success: Success, low: float, high: float) -> None:
    by_name = dict(zip(("tokens_per_s", "seconds_per_sample"), ratios, strict=True))
    assert low <= confirmation_p(by_name, drops, success.confirm_if) <= high
