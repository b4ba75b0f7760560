"""The guarantee: the winner of a search is tested against the limit on problems that the search never saw.

Candidates are tried in an order that the search alone has settled. The first has an interval at the whole confidence,
each further one at half the error of the one before. An interval errs on the side of the limit with half its error, so
the probability that any attempt confirms a candidate beyond the limit is at most alpha/2 + alpha/4 + ... = alpha.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, Protocol

from stepsaver.bench.statistics import Interval
from stepsaver.tune.race import NEVER_SEEN, NORMAL, Observed, drop_interval, speed_interval

Outcome = Literal["confirmed", "rejected", "undecided"]
POWER = 0.9  # the probability of confirming a candidate that is as good as it looked
MOST_ATTEMPTS = 4


def confidence_of(attempt: int, confidence: float) -> float:
    """Returns the confidence of an attempt's intervals; attempts count from 1."""
    return 1 - (1 - confidence) / 2 ** (attempt - 1)


def least_problems(limit: float, confidence: float) -> int:
    """Returns the fewest problems that can confirm: with fewer, even without a single difference, the drop's interval
    still contains the limit.
    """
    distance = NORMAL.inv_cdf(0.5 + confidence / 2) ** 2
    return ceil(distance * (1 - limit) / limit) + 1


def problems_needed(observed: Observed, *, limit: float, confidence: float, most: int) -> int:
    """Returns how many problems confirm a candidate with `POWER`, even if it is a little worse than the search saw it;
    `most` if no number is enough.
    """
    least = least_problems(limit, confidence)
    distance = limit - observed.cautious_drop()
    if distance <= 0:
        return most
    each = (observed.lost + observed.won + NEVER_SEEN) / observed.problems
    deviations = NORMAL.inv_cdf(0.5 + confidence / 2) + NORMAL.inv_cdf(POWER)
    return max(min(least, most), min(most, ceil(each * (deviations / distance) ** 2)))


@dataclass(frozen=True)
class Attempt:
    """An attempt to confirm a candidate on fresh problems."""

    name: str
    number: int
    confidence: float
    problems: int
    speed_up: Interval
    drop: Interval  # a share
    outcome: Outcome

    @property
    def reason(self) -> str:
        if self.outcome == "confirmed":
            return "the drop's whole interval is within the limit, the speed-up's above 1"
        if self.speed_up.low <= 1:
            return "it is not surely faster than plain decoding"
        return (
            "its drop is surely beyond the limit"
            if self.outcome == "rejected"
            else "its drop's interval holds the limit"
        )


def judged(name: str, number: int, observed: Observed, *, limit: float, confidence: float) -> Attempt:
    level = confidence_of(number, confidence)
    drop, speed = drop_interval(observed, level), speed_interval(observed, level)
    outcome: Outcome = "undecided"
    if drop.high < limit and speed.low > 1:
        outcome = "confirmed"
    elif drop.low >= limit or speed.high <= 1:
        outcome = "rejected"
    return Attempt(name, number, level, observed.problems, speed, drop, outcome)


class Trial(Protocol):
    """Runs a candidate on fresh problems."""

    def __call__(self, name: str, number: int, problems: int) -> Observed | None:
        """Runs about `problems` problems as attempt `number`; returns None if the budget does not allow it."""
        ...


def confirm(
    ranked: Sequence[tuple[str, Observed]],
    trial: Trial,
    *,
    limit: float,
    confidence: float,
    most_problems: int,
    attempts_before: int = 0,
) -> Iterator[Attempt]:
    """Tries candidates in their order until one is confirmed. Each sees the fresh problems once."""
    for number, (name, searched) in enumerate(ranked, attempts_before + 1):
        if number > MOST_ATTEMPTS:
            return
        level = confidence_of(number, confidence)
        wanted = problems_needed(searched, limit=limit, confidence=level, most=most_problems)
        observed = trial(name, number, wanted)
        if observed is None:
            return
        attempt = judged(name, number, observed, limit=limit, confidence=confidence)
        yield attempt
        if attempt.outcome == "confirmed":
            return
