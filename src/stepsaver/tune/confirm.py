"""The guarantee: the winner of a search is tested against the limit on problems that the search never saw.

Candidates are tried in an order that the search alone has settled. The first has an interval at the whole confidence,
each further one at half the error of the one before. An interval errs on the side of the limit with half its error, so
the probability that any attempt confirms a candidate beyond the limit is at most alpha/2 + alpha/4 + ... = alpha.

An attempt is on disk before its first problem is run. A tuning that is stopped and run again therefore counts it, and
goes on with it first, on exactly the problems on record: no candidate gets a second try at the fresh problems.
"""

import json
from collections.abc import Iterable, Mapping
from math import ceil, sqrt
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from stepsaver.bench.documents import Stored, StoredInterval
from stepsaver.bench.durable import write_beside
from stepsaver.bench.statistics import fewest_samples
from stepsaver.bench.store import read_json
from stepsaver.engine.errors import UsageError
from stepsaver.tune.observed import NORMAL, Goal, Observed, drop_interval, speed_interval

POWER = 0.9  # the probability of confirming a candidate that is as good as expected
CAUTION = 1.0  # deviations by which its drop may be worse than expected
MOST_ATTEMPTS = 4


class Attempt(Stored):
    """An attempt to confirm a candidate on fresh problems; its intervals once it has ended."""

    name: str
    number: int = Field(ge=1)
    confidence: float
    problems: int = Field(ge=1)
    outcome: Literal["begun", "confirmed", "rejected", "undecided"] = "begun"
    speed_up: StoredInterval | None = None
    over_reference: StoredInterval | None = None  # the speed-up over autoregressive decoding, if that was timed
    drop: StoredInterval | None = None  # a share


class AttemptsDocument(Stored):
    settings: dict[str, Any]
    attempts: list[Attempt]


class Attempts:
    """The attempts of a tuning, in its folder."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Reads what the folder has of a tuning with these settings; one with other settings needs another folder."""
        self.path, self.settings = folder / "attempts.json", dict(settings)
        self.made: list[Attempt] = []
        if not self.path.exists():
            return
        document = AttemptsDocument.read(read_json(self.path))
        if document is None or [each.number for each in document.attempts] != [*range(1, len(document.attempts) + 1)]:
            raise UsageError(f"{self.path} is damaged: set it aside, and its results with it")
        different = [name for name, value in self.settings.items() if document.settings.get(name) != value]
        if different:
            raise UsageError(
                f"{folder} is a tuning with another {', '.join(different)}; choose another folder with --out"
            )
        self.made = document.attempts

    @property
    def confirmed(self) -> Attempt | None:
        return next((each for each in self.made if each.outcome == "confirmed"), None)

    def record(self, attempt: Attempt) -> None:
        """Puts an attempt that begins or has ended on record."""
        self.made = [*(each for each in self.made if each.number != attempt.number), attempt]
        self.made.sort(key=lambda each: each.number)
        self._write()

    def _write(self) -> None:
        content = AttemptsDocument(settings=self.settings, attempts=self.made).model_dump()
        write_beside(self.path, json.dumps(content, indent=1) + "\n")


def confidence_of(attempt: int, confidence: float) -> float:
    """Returns the confidence of an attempt's intervals; attempts count from 1."""
    return 1 - (1 - confidence) / 2 ** (attempt - 1)


def problems_needed(seen: Observed, goal: Goal, confidence: float) -> int:
    """Returns how many problems confirm a candidate with `POWER`, even if it is a little worse than the search saw it;
    all there are if no number is enough.
    """
    drop, variance = goal.expected_drop(seen)
    distance = goal.limit - drop - CAUTION * sqrt(variance)
    if distance <= 0:
        return goal.fresh_problems
    deviations = NORMAL.inv_cdf(0.5 + confidence / 2) + NORMAL.inv_cdf(POWER)
    needed = ceil(seen.variance * (deviations / distance) ** 2)
    return min(max(needed, fewest_samples(goal.limit, confidence)), goal.fresh_problems)


def judged(attempt: Attempt, seen: Observed, limit: float) -> Attempt:
    """Confirmed: the drop's whole interval is within the limit, and those of the speed-ups are above 1."""
    drop = drop_interval(seen, attempt.confidence)
    ups = [
        speed_interval(each, attempt.confidence) for each in (seen.speed_ups, seen.over_reference) if each is not None
    ]
    outcome = "undecided"
    if drop.high < limit and all(up.low > 1 for up in ups):
        outcome = "confirmed"
    elif drop.low >= limit or any(up.high <= 1 for up in ups):
        outcome = "rejected"
    found = {"outcome": outcome, "drop": drop, "speed_up": ups[0], "over_reference": ups[1] if len(ups) > 1 else None}
    return Attempt(**attempt.as_json() | found)


class RunsFresh(Protocol):
    """Runs candidates on fresh problems."""

    def affordable(self, name: str, problems: int) -> int:
        """Returns how many of these problems there is time for."""
        ...

    def run_first(self, name: str, problems: int) -> Observed | None:
        """Runs a candidate on the first so many fresh problems; None if it is not known any more."""
        ...


def confirm(attempts: Attempts, ranked: Iterable[tuple[str, Observed]], trials: RunsFresh, goal: Goal) -> None:
    """Goes on with what has begun, then tries candidates in their order until one is confirmed."""
    for begun in [each for each in attempts.made if each.outcome == "begun"]:
        if attempts.confirmed is None:
            _finish(attempts, begun, trials, goal)
    for name, seen in ranked:
        number = len(attempts.made) + 1
        if attempts.confirmed or number > MOST_ATTEMPTS:
            return
        if name in {each.name for each in attempts.made}:
            continue
        confidence = confidence_of(number, goal.confidence)
        problems = trials.affordable(name, problems_needed(seen, goal, confidence))
        if problems < fewest_samples(goal.limit, confidence):
            return
        begun = Attempt(name=name, number=number, confidence=confidence, problems=problems)
        attempts.record(begun)
        _finish(attempts, begun, trials, goal)


def _finish(attempts: Attempts, begun: Attempt, trials: RunsFresh, goal: Goal) -> None:
    seen = trials.run_first(begun.name, begun.problems)
    if seen is not None:
        assert seen.problems == begun.problems, "an attempt takes the problems that are on record"
        attempts.record(judged(begun, seen, goal.limit))
