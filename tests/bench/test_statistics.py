"""Intervals and tests against published values and scipy's, verdicts on both sides of every bound."""

from bisect import bisect
from math import nan
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom, binomtest, ttest_1samp, ttest_rel

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Criterion, Success
from stepsaver.bench.statistics import (
    Ratio,
    SessionSpread,
    fewest_samples,
    holm,
    mean_of,
    median_interval,
    most_configs,
    paired,
    pooled_sessions,
    ratio_interval,
    ratio_p,
    share_interval,
    spread_of,
)
from stepsaver.bench.timings import chunk_pairs, compare_speeds, confirmation_p, speed_ups
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


def test_a_paired_drop_is_tangos_where_scores_are_right_or_wrong() -> None:
    """21 children before and after a transplantation: Fagerland et al., Statistics in Medicine 33, 2014."""
    worse = paired([1.0] * 7 + [0.0] + [1.0] * 13, [0.0] * 7 + [1.0] + [1.0] * 13)
    assert (worse.test, worse.lost, worse.won) == ("score", 7, 1)
    assert worse.drop() == pytest.approx((6 / 21, 0.026, 0.517), abs=5e-4)
    same = paired([1.0] * 16, [1.0] * 16)
    assert same.drop() == pytest.approx((0.0, -0.194, 0.194), abs=1e-3), "no difference on few samples shows little"


def test_other_scores_get_a_paired_t_interval() -> None:
    """Against scipy's. Where none of them differs there is no spread to go by, and the score interval stands."""
    before, after = [0.5, 0.25, 1.0, 0.75, 0.4, 0.9], [0.25, 0.25, 0.5, 1.0, 0.3, 0.7]
    scores = paired(before, after)
    expected = ttest_rel(before, after)
    assert scores.test == "t"
    bounds = expected.confidence_interval(0.95)
    assert scores.drop() == pytest.approx((float(np.mean(np.subtract(before, after))), bounds.low, bounds.high))
    assert scores.p_value(0.0, above=True) == pytest.approx(expected.pvalue)
    assert scores.p_value(0.0, above=False) == 1.0
    same = paired(before, before)
    assert (same.test, same.drop()) == ("score", paired([1.0] * 6, [1.0] * 6).drop())


@pytest.mark.parametrize("lost", range(0, 40, 3))
def test_a_p_value_is_of_the_interval_beside_it(lost: int) -> None:
    """The interval excludes a bound exactly where p is below 5 %, on either side."""
    scores = paired([1.0] * 300, [0.0] * lost + [1.0] * (300 - lost))
    mean = mean_of(spread_of(ratios([1.0 + 0.01 * (lost - 20 + chunk % 5) for chunk in range(9)])), SessionSpread(0, 0))
    for bound in (0.01, 0.05, 0.1):
        assert (scores.drop().high < bound) == (scores.p_value(bound, above=False) < 0.05)
        assert (scores.drop().low > bound) == (scores.p_value(bound, above=True) < 0.05)
        assert (ratio_interval(mean).low > 1 + bound) == (ratio_p(mean, 1 + bound, above=True) < 0.05)
        assert (ratio_interval(mean).high < 1 + bound) == (ratio_p(mean, 1 + bound, above=False) < 0.05)


@pytest.mark.parametrize(("points", "least"), [(5, 74), (1.5, 254), (1, 382)])
def test_the_fewest_samples_that_can_show_a_drop_below_a_bound(points: float, least: int) -> None:
    for samples, can in ((least, True), (least - 2, False)):
        assert (paired([1.0] * samples, [1.0] * samples).drop().high < points / 100) == can
    assert fewest_samples(points / 100) == least
    assert most_configs(least - 2, points / 100) == 0 < most_configs(least, points / 100)


def test_how_many_configs_a_run_can_decide() -> None:
    p_value = paired([1.0] * 160, [1.0] * 160).p_value(0.05, above=False)
    most = int(most_configs(160, 0.05))
    assert most * p_value <= 0.05 < (most + 1) * p_value
    assert holm({str(index): p_value for index in range(most)})
    assert not holm({str(index): p_value for index in range(most + 1)})


def ratios(values: list[float], session: str = "s") -> list[Ratio]:
    return [Ratio(chunk, session, value) for chunk, value in enumerate(values)]


def test_the_interval_of_one_session_is_students_of_the_logarithms() -> None:
    values = [1.5, 1.6, 1.4, 1.55, 1.45, 1.52]
    found = ratio_interval(mean_of(spread_of(ratios(values)), SessionSpread(0, 0)))
    expected = ttest_1samp(np.log(values), 0).confidence_interval(0.95)
    assert found == pytest.approx(tuple(np.exp([np.mean(np.log(values)), expected.low, expected.high])))


def test_the_variances_of_a_balanced_run_are_those_of_the_analysis_of_variance() -> None:
    values = np.exp([[0.10, 0.16, 0.13], [0.20, 0.29, 0.20], [0.05, 0.12, 0.11], [0.15, 0.20, 0.19]])
    found = spread_of([Ratio(k, str(s), float(values[k, s])) for k in range(4) for s in range(3)])
    logs = np.log(values)
    of_chunks = 3 * logs.mean(axis=1).var(ddof=1)
    of_sessions = 4 * logs.mean(axis=0).var(ddof=1)
    left = ((logs - logs.mean(axis=1)[:, None] - logs.mean(axis=0) + logs.mean()) ** 2).sum() / 6
    assert found.session_variance == pytest.approx((of_sessions - left) / 4)
    assert found.rest == pytest.approx(of_chunks / 12)
    assert found.session_noise == pytest.approx(left / 4)
    assert mean_of(found, pooled_sessions([found])).error ** 2 == pytest.approx((of_chunks + of_sessions - left) / 12)


@pytest.mark.parametrize("between", [0.0, 0.02, 0.05])
@pytest.mark.parametrize(("chunks", "sessions", "configs", "lost"), [(40, 3, 6, 0), (40, 3, 1, 0.3), (8, 5, 6, 0.3)])
def test_intervals_of_several_sessions_hold_the_truth(
    between: float, chunks: int, sessions: int, configs: int, lost: float
) -> None:
    """At least 93 of 100 times, whatever sessions differ by, also if a part of the timings is not there."""
    random, times = np.random.default_rng(0), 250
    held = 0
    for _ in range(times):
        baseline = random.normal(0, between / 2**0.5, sessions)
        spreads = []
        for _ in range(configs):
            of_session = random.normal(0, between / 2**0.5, sessions) - baseline
            logs = random.normal(0, 0.03, (chunks, 1)) + of_session + random.normal(0, 0.02, (chunks, sessions))
            kept = random.random((chunks, sessions)) >= lost
            spreads.append(spread_of([Ratio(k, str(s), float(np.exp(logs[k, s]))) for k, s in np.argwhere(kept)]))
        found = [ratio_interval(mean_of(each, pooled_sessions(spreads))) for each in spreads]
        held += sum(each.low <= 1 <= each.high for each in found)
    assert held / (times * configs) >= 0.93


def test_what_was_timed_once_has_no_interval() -> None:
    found = mean_of(spread_of(ratios([1.5])), SessionSpread(0, 0))
    assert (found.interval().value, np.isnan(found.interval()[1:]).all()) == (pytest.approx(np.log(1.5)), True)
    assert ratio_p(found, 1.2, above=True) == 1.0


@pytest.mark.parametrize(
    ("lost", "won", "p_value"),
    [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (6, 0, 2 / 64), (1, 1, 1.0), (0, 0, 1.0)],
)
def test_mcnemars_exact_test(lost: int, won: int, p_value: float) -> None:
    scores = paired([1.0] * lost + [0.0] * won + [1.0], [0.0] * lost + [1.0] * won + [1.0])
    assert scores.mcnemar_p() == pytest.approx(p_value)


def test_a_drop_of_no_sample_is_unknown() -> None:
    scores = paired([], [])
    assert np.isnan(scores.drop()).all()
    assert (scores.lost, scores.won, scores.mcnemar_p(), scores.p_value(0.1, above=False)) == (0, 0, 1.0, 1.0)


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


def test_speed_ups_pair_chunks_of_one_session_only() -> None:
    ours = [timing(chunk, session=session) for chunk, session in enumerate("aab")]
    base = [timing(chunk, session=session, seconds=2.0) for chunk, session in enumerate("abb")]
    base[2] = base[2].model_copy(update={"tokens": 50})
    pairs = chunk_pairs(ours, base)
    assert [(pair[0].chunk, pair[1].session) for pair in pairs] == [(0, "a"), (2, "b")]
    found = speed_ups(pairs)
    assert found.tokens_per_s == [(0, "a", 2.0), (2, "b", 4.0)]
    assert [each.value for each in found.seconds_per_sample] == [2.0, 2.0]


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
        pairs=chunks,
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
        (
            summary("seven", UP, DROP, chunks=7),
            "undecided",
            "7 pairs of a chunk and a session; 8 decide, which takes `run",
        ),
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


GOOD, BAD = 2.0, 1.1


@pytest.mark.parametrize(
    ("seconds", "samples", "lost", "stands"),
    [
        (GOOD, 8, 0, True),
        (BAD, 8, 0, False),
        (GOOD, 4, 0, False),  # as many tokens a second of half as many samples
        (GOOD, 8, 20, False),
        (GOOD, 8, 2, True),
    ],
)
def test_confirmation_needs_every_bound(seconds: float, samples: int, lost: int, stands: bool) -> None:
    ours = [timing(chunk, samples=samples, seconds=1 + 0.01 * (chunk % 3)) for chunk in range(20)]
    base = [timing(chunk, seconds=seconds) for chunk in range(20)]
    faster = compare_speeds({"config": chunk_pairs(ours, base), "none": []})
    drop = paired([1.0] * 200, [0.0] * lost + [1.0] * (200 - lost))
    assert (confirmation_p(faster["config"], drop, SUCCESS.confirm_if) < 0.05) == stands
    assert confirmation_p(faster["none"], drop, SUCCESS.confirm_if) == 1.0
    assert confirmation_p(faster["config"], paired([], []), SUCCESS.confirm_if) == 1.0


def test_a_baseline_is_as_fast_as_itself_whatever_others_show() -> None:
    def timed(rate: float) -> list:
        return [timing(chunk, session=day, seconds=rate * (1 + (day == "b"))) for day in "ab" for chunk in range(9)]

    base, other = timed(1.0), [each.model_copy(update={"seconds": 1.0 + 0.1 * each.chunk}) for each in timed(1.0)]
    found = compare_speeds({"baseline": chunk_pairs(base, base), "other": chunk_pairs(other, base)})
    assert found["baseline"].stored().tokens_per_s == (1.0, 1.0, 1.0)
    assert found["other"].stored().tokens_per_s.high > 1.5


def test_the_reference_is_shown_and_never_judged() -> None:
    """However fast it is: it is no hypothesis in Holm's correction, and no other config's verdict changes."""
    fast = summary("fast", UP, DROP, p=0.05)
    over = {each: [1.2, 1.1, 1.3] for each in ("tokens_per_s", "seconds_per_sample")}
    reference = summary("autoregressive", (3.0, 2.9, 3.1), DROP, p=0.0001, is_reference=True)
    beside = judge([fast.model_copy(update={"over_reference": made_up.summary(over_reference=over).over_reference}),
                    reference], lambda _: SUCCESS)  # fmt: skip
    assert [each.config for each in beside.configs] == ["fast"]
    assert beside.sentence == (
        "Confirmed by fast: 1.50x [1.40, 1.60], 1.20x [1.10, 1.30] of autoregressive decoding, "
        "at a drop of 1.0 [0.0, 2.0] points."
    )
    assert judge([reference], lambda _: SUCCESS).sentence == "Undecided: no config beside the baseline has results."
