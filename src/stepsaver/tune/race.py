"""What trials say about a candidate, with intervals, and when it leaves the race."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from statistics import NormalDist, fmean, median

from scipy.special import stdtrit

from stepsaver.bench.statistics import Interval

FEW_CHUNKS = 4
CAUTION = 1.5  # deviations by which a drop is taken to be worse than it looks, in the end: the best of many looks too
# good. At the beginning none: a deviation is then larger than any limit, and those who differ least would come first.
BY_LUCK = 2.5  # deviations that a drop below zero is taken to owe to luck
LIKELY = 0.8  # the chance of being confirmed above which slower candidates are given up
NORMAL = NormalDist()
NEVER_SEEN = 1.0  # a difference that is added to a variance: few problems cannot tell none from one


@dataclass(frozen=True)
class Observed:
    """A candidate beside the baseline on the same problems. `lost` and `won` are sums of differences of marks.

    Where marks are shares and not right or wrong, a difference counts by its size: that makes the intervals wider than
    they need be, never narrower.
    """

    problems: int
    lost: float
    won: float
    speed_ups: tuple[float, ...]  # one for each chunk that was timed beside the baseline
    predicted: float | None = None  # speed-up, by what rows take on this machine

    @property
    def drop(self) -> float:
        return (self.lost - self.won) / self.problems

    @property
    def deviation(self) -> float:
        """The standard error of the drop."""
        seen = self.lost + self.won + NEVER_SEEN
        return sqrt(max(seen / self.problems - self.drop**2, 0.0) / self.problems)

    def cautious_drop(self, caution: float = CAUTION) -> float:
        """The drop, so many deviations worse than it looks."""
        return self.drop + caution * self.deviation

    def without_luck(self, deviations: float = inf) -> "Observed":
        """As many differences, and no drop below zero: on few problems that is luck more often than not.

        Only what lies so many deviations below zero is none.
        """
        if self.drop >= 0:
            return self
        beyond = min(self.drop + deviations * self.deviation, 0.0) if self.deviation else 0.0
        half = (self.lost + self.won) / 2
        return replace(self, lost=half + beyond * self.problems / 2, won=half - beyond * self.problems / 2)

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups) if self.speed_ups else float("nan")

    @property
    def expected_speed_up(self) -> float:
        """What candidates are ordered by. While few chunks are timed it uses the predicted one, which has no noise."""
        if self.predicted is None or len(self.speed_ups) >= FEW_CHUNKS:
            return self.speed_up
        return sqrt(self.predicted * self.speed_up) if self.speed_ups else self.predicted


def drop_interval(observed: Observed, confidence: float) -> Interval:
    """Returns Tango's score interval of a difference of paired shares (Statistics in Medicine 17, 1998).

    It keeps its level if differences are few, and does not shrink to a point if there are none, as a bootstrap does.
    """
    distance = NORMAL.inv_cdf(0.5 + confidence / 2)
    return Interval(observed.drop, _score_bound(observed, distance), _score_bound(observed, -distance))


def _score_bound(observed: Observed, distance: float) -> float:
    """Returns the true difference that what was seen is `distance` deviations above: the lower bound if positive."""
    near, far = observed.drop, -1.0 if distance > 0 else 1.0
    for _ in range(40):
        middle = (near + far) / 2
        if abs(_score(observed, middle)) < abs(distance):
            near = middle
        else:
            far = middle
    return (near + far) / 2


def _score(observed: Observed, difference: float) -> float:
    """Returns Tango's statistic: the deviations between what was seen and a true difference."""
    count, lost, won = observed.problems, observed.lost, observed.won
    linear = -lost - won + (2 * count - lost + won) * difference
    constant = -won * difference * (1 - difference)
    likeliest = (sqrt(max(linear**2 - 8 * count * constant, 0.0)) - linear) / (4 * count)  # share of those won
    variance = count * (2 * likeliest + difference * (1 - difference))
    return (lost - won - count * difference) / sqrt(variance) if variance > 0 else float("inf") * (lost - won or 1)


def speed_interval(observed: Observed, confidence: float) -> Interval:
    """Returns Student's interval of the logarithms of the chunks' speed-ups; a single chunk has no bounds."""
    count = len(observed.speed_ups)
    if count < 2:
        return Interval(observed.speed_up, 0.0, float("inf"))
    logs = [log(each) for each in observed.speed_ups]
    middle = fmean(logs)
    deviation = sqrt(sum((each - middle) ** 2 for each in logs) / (count - 1))
    width = float(stdtrit(count - 1, 0.5 + confidence / 2)) * deviation / sqrt(count)
    return Interval(exp(middle), exp(middle - width), exp(middle + width))


@dataclass(frozen=True)
class Goal:
    """What a search is after: the fastest candidate whose drop can be confirmed to be within a limit."""

    limit: float  # of the drop, a share
    confidence: float
    fresh_problems: int  # that a winner can be confirmed on

    def why_out(self, observed: Observed, best_low: float) -> str | None:
        """Returns why a candidate leaves, if it does: it surely costs more than the limit, or is surely slower."""
        drop = drop_interval(observed, self.confidence)
        if drop.low > self.limit:
            low, high = 100 * drop.low, 100 * drop.high
            return f"its drop is above the limit: {100 * drop.value:.1f} [{low:.1f}, {high:.1f}] points"
        speed = speed_interval(observed, self.confidence)
        if speed.high < best_low:
            return f"it is slower than the best: {speed.value:.2f}x [{speed.low:.2f}, {speed.high:.2f}]"
        return None

    def best_lower_bound(self, racing: Iterable[Observed]) -> float:
        """Returns the highest lower bound among those likely to be confirmed; at least 1, which is plain decoding's."""
        within = [speed_interval(each, self.confidence).low for each in racing if self.chance(each) > LIKELY]
        return max([1.0, *within])

    def chance(self, observed: Observed, caution: float = CAUTION) -> float:
        """Returns how likely the drop's whole interval is within the limit on fresh problems.

        The true drop is as uncertain as the search leaves it, and fresh problems add their own scatter. A drop below
        zero counts as far as luck does not explain it, or else candidates that were lucky would come first. `caution`:
        deviations by which it is taken to be worse.
        """
        observed = observed.without_luck(BY_LUCK)
        each = (observed.lost + observed.won + NEVER_SEEN) / observed.problems
        fresh = sqrt(each / self.fresh_problems)
        distance = NORMAL.inv_cdf(0.5 + self.confidence / 2) * fresh
        scatter = sqrt(observed.deviation**2 + fresh**2)
        return NORMAL.cdf((self.limit - observed.cautious_drop(caution) - distance) / scatter)

    def expected_gain(self, observed: Observed, caution: float = CAUTION) -> float:
        """Returns the logarithm of the speed-up, times the chance that it can be confirmed if it is a gain."""
        gain = log(max(observed.expected_speed_up, 1e-9))
        return gain * self.chance(observed, caution) if gain > 0 else gain
