"""Intervals and paired comparisons. Everything is seeded: the same results give the same numbers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 2000


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        return Interval(*(factor * each for each in self))


def share_interval(right: float, count: int) -> Interval:
    """Returns a share with its Wilson interval. `right` may be fractional, if a metric gives partial credit."""
    if count == 0:
        return Interval(float("nan"), 0.0, 1.0)
    bounds = binomtest(round(right), count).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(right / count, float(bounds.low), float(bounds.high))


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median with a bootstrap interval."""
    data = np.asarray(values, dtype=float)
    if len(data) == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    medians = np.median(_resampled(data), axis=1)
    return Interval(float(np.median(data)), *_percentiles(medians))


class PairedDrop(NamedTuple):
    """How much accuracy is lost against the baseline on the same samples."""

    drop: Interval  # a share; positive: worse than the baseline
    lost: int  # right in the baseline only
    won: int  # right here only
    p_value: float  # McNemar's exact test


def paired_drop(baseline: Sequence[float], values: Sequence[float]) -> PairedDrop:
    before, after = np.asarray(baseline, dtype=float), np.asarray(values, dtype=float)
    assert len(before) == len(after), "samples are paired"
    difference = before - after
    lost, won = int((difference > 0).sum()), int((difference < 0).sum())
    p_value = float(binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    if not len(difference):
        return PairedDrop(Interval(float("nan"), float("nan"), float("nan")), 0, 0, 1.0)
    return PairedDrop(
        Interval(float(difference.mean()), *_percentiles(_resampled(difference).mean(axis=1))), lost, won, p_value
    )


def bootstrap_p(values: Sequence[float], bound: float, *, statistic: str, above: bool) -> float:
    """Returns how often a resample is not on the wanted side of a bound: a one-sided p-value, never zero."""
    resampled = _resampled(np.asarray(values, dtype=float))
    found = np.median(resampled, axis=1) if statistic == "median" else resampled.mean(axis=1)
    misses = (found <= bound).sum() if above else (found >= bound).sum()
    return float((misses + 1) / (RESAMPLES + 1))


def holm(p_values: dict[str, float], level: float = 1 - CONFIDENCE) -> set[str]:
    """Returns the hypotheses that stand after Holm's correction."""
    standing: set[str] = set()
    for rank, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        if p_values[name] > level / (len(p_values) - rank):
            break
        standing.add(name)
    return standing


def _resampled(data: np.ndarray) -> np.ndarray:
    indices = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    return data[indices]


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
