"""Intervals and tests of paired results. An interval and the p-value beside it are of the same test: a 95 % interval
excludes a bound exactly where the two-sided p-value is below 5 %.
"""

from collections.abc import Iterable, Sequence
from math import ceil, exp, inf, log, nan, sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit
from scipy.stats import binomtest

CONFIDENCE = 0.95
RESAMPLES = 2000
NORMAL = NormalDist()
BASELINE_SHARE = 0.5  # the correlation of two configs' session effects: half of each ratio's is the baseline's


class Interval(NamedTuple):
    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        return Interval(*(factor * each for each in self))


UNKNOWN = Interval(nan, nan, nan)


def share_interval(right: float, count: int) -> Interval:
    """Returns a share with its Wilson interval. `right` may be fractional, if a metric gives partial credit."""
    if count == 0:
        return Interval(nan, 0.0, 1.0)
    bounds = binomtest(round(right), count).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(right / count, float(bounds.low), float(bounds.high))


def median_interval(values: Sequence[float]) -> Interval:
    """Returns the median with a bootstrap interval, seeded: the same values give the same bounds."""
    data = np.asarray(values, dtype=float)
    if len(data) == 0:
        return UNKNOWN
    indices = np.random.default_rng(0).integers(0, len(data), (RESAMPLES, len(data)))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(np.median(data[indices], axis=1), [tail, 100 - tail])
    return Interval(float(np.median(data)), float(low), float(high))


def holm(p_values: dict[str, float], level: float = 1 - CONFIDENCE) -> set[str]:
    """Returns the hypotheses that stand after Holm's correction."""
    standing: set[str] = set()
    for rank, name in enumerate(sorted(p_values, key=lambda each: p_values[each])):
        if p_values[name] > level / (len(p_values) - rank):
            break
        standing.add(name)
    return standing


class Mean(NamedTuple):
    """A mean with its standard error, to be read by Student's t. Without degrees of freedom nothing bounds it."""

    value: float
    error: float
    freedom: float

    def interval(self, confidence: float = CONFIDENCE) -> Interval:
        if not self.freedom > 0:
            return Interval(self.value, nan, nan)
        width = float(stdtrit(self.freedom, 0.5 + confidence / 2)) * self.error
        return Interval(self.value, self.value - width, self.value + width)

    def p_value(self, bound: float, *, above: bool) -> float:
        """Returns the two-sided p-value if it is on the wanted side of a bound, else 1."""
        distance = self.value - bound if above else bound - self.value
        if not self.freedom > 0 or not distance > 0:
            return 1.0
        return 2 * float(stdtr(self.freedom, -distance / self.error)) if self.error else 0.0


# ---- drops: paired differences of scores


class PairedScores(NamedTuple):
    """How much of each sample's score is lost against another config, and won, over the same samples."""

    differences: np.ndarray  # positive: worse
    is_binary: bool  # every score is 0 or 1

    @property
    def lost(self) -> int:
        return int((self.differences > 0).sum())

    @property
    def won(self) -> int:
        return int((self.differences < 0).sum())

    @property
    def test(self) -> Literal["score", "t"]:
        """Tango's score test of paired shares; of other scores a paired t-test, if any of them differ."""
        return "score" if self.is_binary or not np.ptp(self.differences) else "t"

    def drop(self, confidence: float = CONFIDENCE) -> Interval:
        if not len(self.differences):
            return UNKNOWN
        if self.test == "t":
            return self._mean().interval(confidence)
        return score_interval(len(self.differences), self.lost, self.won, confidence)

    def p_value(self, bound: float, *, above: bool) -> float:
        """Returns the two-sided p-value if the drop is on the wanted side of a bound, else 1."""
        count = len(self.differences)
        if not count:
            return 1.0
        if self.test == "t":
            return self._mean().p_value(bound, above=above)
        deviations = score_statistic(count, self.lost, self.won, bound)
        return min(1.0, 2 * NORMAL.cdf(-deviations if above else deviations))

    def mcnemar_p(self) -> float:
        """Returns McNemar's exact p-value against "both are as often right"."""
        together = self.lost + self.won
        return float(binomtest(self.lost, together).pvalue) if together else 1.0

    def _mean(self) -> Mean:
        count = len(self.differences)
        return Mean(float(self.differences.mean()), float(self.differences.std(ddof=1)) / sqrt(count), count - 1)


def paired(baseline: Sequence[float], values: Sequence[float]) -> PairedScores:
    before, after = np.asarray(baseline, dtype=float), np.asarray(values, dtype=float)
    assert len(before) == len(after), "samples are paired"
    return PairedScores(before - after, bool(np.isin(np.concatenate([before, after]), (0.0, 1.0)).all()))


def score_interval(count: int, lost: float, won: float, confidence: float = CONFIDENCE) -> Interval:
    """Returns Tango's score interval of a difference of paired shares (Statistics in Medicine 17, 1998).

    It keeps its level if differences are few, and does not shrink to a point if there are none, as a bootstrap does.
    """
    distance = NORMAL.inv_cdf(0.5 + confidence / 2)
    low, high = (_score_bound(count, lost, won, side * distance) for side in (1, -1))
    return Interval((lost - won) / count, low, high)


def _score_bound(count: int, lost: float, won: float, distance: float) -> float:
    """Returns the true difference that what was seen is `distance` deviations above: the lower bound if positive."""
    near, far = (lost - won) / count, -1.0 if distance > 0 else 1.0
    for _ in range(40):
        middle = (near + far) / 2
        if abs(score_statistic(count, lost, won, middle)) < abs(distance):
            near = middle
        else:
            far = middle
    return (near + far) / 2


def score_statistic(count: int, lost: float, won: float, difference: float) -> float:
    """Returns Tango's statistic: the deviations between what was seen and a true difference."""
    above = lost - won - count * difference
    if not -1 < difference < 1:
        return inf * above if above else 0.0
    linear = -lost - won + (2 * count - lost + won) * difference
    constant = -won * difference * (1 - difference)
    likeliest = (sqrt(max(linear**2 - 8 * count * constant, 0.0)) - linear) / (4 * count)  # share of those won
    variance = count * (2 * likeliest + difference * (1 - difference))
    return above / sqrt(variance) if variance > 0 else inf * above if above else 0.0


def fewest_samples(limit: float, confidence: float = CONFIDENCE) -> int:
    """Returns the fewest samples that can show a drop below a limit: with fewer, Tango's interval contains the limit
    even if no answer differs.
    """
    distance = NORMAL.inv_cdf(0.5 + confidence / 2) ** 2
    return ceil(distance * (1 - limit) / limit) + 1


def most_configs(samples: int, limit: float) -> float:
    """Returns among how many configs Holm's correction lets a run of so many samples show a drop below a limit."""
    p_value = 2 * NORMAL.cdf(score_statistic(samples, 0, 0, limit))
    return (1 - CONFIDENCE) // p_value if p_value > 0 else inf


# ---- speed-ups: logarithms of ratios, by chunk and session


class Ratio(NamedTuple):
    chunk: int
    session: str  # the process that timed both sides
    value: float


class Spread(NamedTuple):
    """The variance of a config's log ratios, taken apart: chunks and sessions are crossed random effects."""

    mean: float
    rest: float  # the squared error of the mean but for sessions
    rest_freedom: int
    session_weight: float  # by which the variance between sessions enters the squared error of the mean
    session_variance: float  # may be negative; of one session: unknown, 0
    session_noise: float  # the variance of a session's mean that is not the session's
    sessions: int


def spread_of(ratios: Sequence[Ratio]) -> Spread:
    """Estimates the components by the method of moments (Henderson's first), which needs no balance: a run that was
    killed has timed some chunks in one session and some in another.
    """
    values = np.log([each.value for each in ratios])
    total = len(values)
    chunks, sessions = (np.unique([each[place] for each in ratios], return_inverse=True)[1] for place in range(2))
    table = np.zeros((chunks.max() + 1, sessions.max() + 1))
    np.add.at(table, (chunks, sessions), 1)
    per_chunk, per_session = table.sum(axis=1), table.sum(axis=0)
    mean = float(values.mean())
    centred = values - mean
    within = float((centred**2).sum())
    by_chunk = float((np.bincount(chunks, centred) ** 2 / per_chunk).sum())
    by_session = float((np.bincount(sessions, centred) ** 2 / per_session).sum())
    chunk_squares, session_squares = (float((each**2).sum()) for each in (per_chunk, per_session))
    of_chunks = total - chunk_squares / total
    of_sessions = total - session_squares / total
    crossed_chunks = float((table**2 / per_session).sum()) - chunk_squares / total
    crossed_sessions = float((table**2 / per_chunk[:, None]).sum()) - session_squares / total
    # what each sum of squares is expected to be, of the variances of chunks, of sessions and of what is left
    expected = np.array(
        [
            [of_chunks, crossed_sessions, len(per_chunk) - 1],
            [crossed_chunks, of_sessions, len(per_session) - 1],
            [of_chunks, of_sessions, total - 1],
        ]
    )
    seen = np.array([by_chunk, by_session, within])
    # what cannot be told apart is one: a chunk that was timed once from what is left, a session of one chunk as well
    known = [0] * (1 < len(per_chunk) < total) + [1] * (len(per_session) > 1 and len(per_session) < total) + [2]
    rows = [row for row, column in ((0, 0), (1, 1), (2, 2)) if column in known]
    variances = np.zeros(3)
    if total > 1:
        variances[known] = np.linalg.solve(expected[np.ix_(rows, known)], seen[rows])
    of_chunk, of_session, left = (float(each) for each in variances)
    weight = session_squares / total**2
    rest = (max(of_chunk, 0.0) * chunk_squares / total + max(left, 0.0)) / total
    if total == len(per_session) > 1:  # one chunk, or a session for each: the sessions are all that varies
        return Spread(mean, 0.0, 0, weight, left, 0.0, len(per_session))
    noise = max(left, 0.0) * len(per_session) / total
    return Spread(mean, rest, len(per_chunk) - 1, weight, of_session, noise, len(per_session))


class SessionSpread(NamedTuple):
    """The variance between sessions, pooled over configs, and how much is known of it."""

    variance: float
    freedom: float  # 0: of a single session nothing is known


def pooled_sessions(spreads: Iterable[Spread]) -> SessionSpread:
    """Configs are timed in the same sessions and divided by the same baseline, so they do not count as many times over
    as there are of them.
    """
    several = [each for each in spreads if each.sessions > 1]
    if not several:
        return SessionSpread(0.0, 0.0)
    weights = [each.sessions - 1 for each in several]
    variance = sum(weight * each.session_variance for weight, each in zip(weights, several, strict=True)) / sum(weights)
    independent = len(several) / (1 + (len(several) - 1) * BASELINE_SHARE**2)
    return SessionSpread(max(variance, 0.0), independent * sum(weights) / len(weights))


def mean_of(spread: Spread, sessions: SessionSpread) -> Mean:
    """Returns the mean log ratio with its error; degrees of freedom are Satterthwaite's."""
    between = spread.session_weight * sessions.variance if spread.sessions > 1 else 0.0
    squared = spread.rest + between
    doubt = 0.0
    if spread.rest_freedom:
        doubt += spread.rest**2 / spread.rest_freedom
    if spread.sessions > 1:
        doubt += (between + spread.session_weight * spread.session_noise) ** 2 / sessions.freedom
    if not doubt:  # nothing varied, or nothing was seen to
        return Mean(spread.mean, 0.0, spread.rest_freedom or (spread.sessions > 1) * sessions.freedom)
    return Mean(spread.mean, sqrt(squared), squared**2 / doubt)


def ratio_interval(mean: Mean, confidence: float = CONFIDENCE) -> Interval:
    """Returns a ratio from the mean of its logarithms."""
    return Interval(*map(exp, mean.interval(confidence)))


def ratio_p(mean: Mean, bound: float, *, above: bool) -> float:
    return mean.p_value(log(bound), above=above) if bound > 0 else float(not above)
