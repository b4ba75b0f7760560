"""What was seen of a candidate beside plain decoding: intervals, and how promising that makes it."""

from dataclasses import dataclass
from math import inf, log, sqrt
from statistics import fmean, median, stdev

from stepsaver.bench.statistics import NORMAL, Interval, Mean, ratio_interval, score_interval

NEVER_SEEN = 1.0  # a difference that is added to a variance: few problems cannot tell none from one
SPREAD = 0.01  # of candidates' drops around half the limit, as far as is known before any problem is run


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
    over_reference: tuple[float, ...] | None = None  # likewise, over autoregressive decoding; None: it was not timed

    @property
    def drop(self) -> float:
        return (self.lost - self.won) / self.problems

    @property
    def variance(self) -> float:
        """Of one problem's difference."""
        return (self.lost + self.won + NEVER_SEEN) / self.problems

    @property
    def speed_up(self) -> float:
        return median(self.speed_ups) if self.speed_ups else float("nan")


@dataclass(frozen=True)
class Goal:
    """What a search is after: the fastest candidate whose drop can be confirmed to be within a limit."""

    limit: float  # of the drop, a share
    confidence: float
    fresh_problems: int  # that a winner can be confirmed on
    floor: float = 1.0  # the speed-up of whatever it has to be faster than

    def expected_drop(self, seen: Observed) -> tuple[float, float]:
        """Returns the drop and its variance: what was seen, drawn towards half the limit while few problems were run.

        The best of many candidates looks better than it is, and on few problems chance moves a drop further than
        settings do. So a drop counts as far as the problems behind it tell it from any other candidate's.
        """
        error = seen.variance / seen.problems
        known = SPREAD**2 / (SPREAD**2 + error)
        return known * seen.drop + (1 - known) * self.limit / 2, known * error

    def chance(self, seen: Observed) -> float:
        """Returns how likely the drop's whole interval is within the limit on fresh problems."""
        drop, variance = self.expected_drop(seen)
        fresh = seen.variance / self.fresh_problems
        distance = self.limit - drop - NORMAL.inv_cdf(0.5 + self.confidence / 2) * sqrt(fresh)
        return NORMAL.cdf(distance / sqrt(variance + fresh))

    def gain(self, seen: Observed) -> float:
        """Returns the logarithm of the speed-up, times the chance that it can be confirmed if it is a gain."""
        gain = log(max(seen.speed_up / self.floor, 1e-9))
        return gain * self.chance(seen) if gain > 0 else gain


def drop_interval(seen: Observed, confidence: float) -> Interval:
    return score_interval(seen.problems, seen.lost, seen.won, confidence)


def speed_interval(speed_ups: tuple[float, ...], confidence: float) -> Interval:
    """Returns Student's interval of the logarithms of the chunks' speed-ups; a single chunk has no bounds."""
    count = len(speed_ups)
    if count < 2:
        return Interval(speed_ups[0] if speed_ups else float("nan"), 0.0, inf)
    logs = [log(each) for each in speed_ups]
    return ratio_interval(Mean(fmean(logs), stdev(logs) / sqrt(count), count - 1), confidence)
