"""The search: single changes first, then combinations that these suggest, then a race over more and more problems.

The guarantee does not depend on it, only on `confirm.py`: a poor search finds less, but never promises more.
"""

from collections.abc import Hashable, Mapping, Sequence
from math import ceil, inf
from typing import Protocol

from stepsaver.tune.observed import Goal, Observed

SHARE_OF_SINGLES, SHARE_OF_COMBINATIONS = 0.35, 0.2  # of the search's time at most; the race has the rest
TOGETHER = 6  # candidates that are timed beside one run of the baseline
FINALISTS = 4  # candidates that race to the end
LEAST_CHANCE = 0.05  # of being confirmed, to be worth fresh problems


class Trials(Protocol):
    """Runs candidates beside the baseline on the search's problems, and remembers what came of it."""

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        ...

    def run(self, names: Sequence[str], chunk: int) -> None:
        """Runs these candidates and the baseline on a chunk, where that is missing."""
        ...

    def observed(self, name: str) -> Observed | None:
        """Returns what is known so far; None for a candidate that was never run."""
        ...

    def chunks_done(self, name: str) -> int:
        """Returns how many chunks a candidate was run on: the first so many."""
        ...

    def seconds_left(self) -> float:
        """Returns what is left of the search's budget."""
        ...


class Space(Protocol):
    """What may be tried."""

    def singles(self) -> Sequence[str]:
        """Returns the candidates that differ from plain decoding in one thing, the cheapest of each kind first."""
        ...

    def kind(self, name: str) -> Hashable:
        """Returns what a single change is a value of: a rule, a policy, ..."""
        ...

    def combinations(self, known: Mapping[str, Observed], goal: Goal) -> list[str]:
        """Returns the most promising combinations of single changes, by what is known about each change."""
        ...


def search(space: Space, trials: Trials, goal: Goal) -> list[tuple[str, Observed]]:
    """Tries candidates, and returns those worth fresh problems: the highest expected gain first, then those that are
    likelier to hold.
    """
    budget = trials.seconds_left()
    tried = _try_singles(space, trials, goal, until=budget * (1 - SHARE_OF_SINGLES))
    combinations = space.combinations(_known(tried, trials), goal)
    tried += _try_once(combinations, trials, until=trials.seconds_left() - budget * SHARE_OF_COMBINATIONS)
    _race(tried, trials, goal)
    ranked: list[tuple[str, Observed]] = []
    for name, seen in _promising(tried, trials, goal).items():
        if goal.chance(seen) > (goal.chance(ranked[-1][1]) if ranked else LEAST_CHANCE):
            ranked.append((name, seen))
    return ranked


def _known(names: Sequence[str], trials: Trials) -> dict[str, Observed]:
    return {name: seen for name in names if (seen := trials.observed(name)) is not None}


def _promising(names: Sequence[str], trials: Trials, goal: Goal) -> dict[str, Observed]:
    """Returns those that may be a gain, the most promising first."""
    known = _known(names, trials)
    gains = {name: gain for name, seen in known.items() if (gain := goal.gain(seen)) > 0}
    return {name: known[name] for name in sorted(gains, key=lambda name: -gains[name])}


def _try_singles(space: Space, trials: Trials, goal: Goal, *, until: float) -> list[str]:
    """Runs a chunk of each, and returns those that ran: one of every kind first, then more of the kinds that promise
    most.
    """
    tried: list[str] = []
    waiting = list(space.singles())
    while waiting and trials.seconds_left() > until:
        tried += _try_once(waiting[:TOGETHER], trials, until=until)
        best: dict[Hashable, float] = {}
        for name, seen in _known(tried, trials).items():
            best[space.kind(name)] = max(best.get(space.kind(name), -inf), goal.gain(seen))
        waiting = sorted(waiting[TOGETHER:], key=lambda name: -best.get(space.kind(name), inf))
    return tried


def _try_once(names: Sequence[str], trials: Trials, *, until: float) -> list[str]:
    """Runs the first chunk of candidates, a few at a time, while there is time. Returns those that ran."""
    ran: list[str] = []
    for start in range(0, len(names), TOGETHER):
        if trials.seconds_left() > until:
            ran += names[start : start + TOGETHER]
            trials.run(names[start : start + TOGETHER], 0)
    return ran


def _race(names: Sequence[str], trials: Trials, goal: Goal) -> None:
    """Halves in small steps: as the time goes by, fewer of the most promising are run on their next problems. One that
    falls back makes room for one that was behind it.
    """
    time = max(trials.seconds_left(), 1e-9)
    while (left := trials.seconds_left()) > 0:
        ordered = list(_promising(names, trials, goal))
        width = len(names) * (FINALISTS / max(len(names), FINALISTS)) ** min(2 * (1 - left / time), 1)
        racing = [name for name in ordered[: ceil(width)] if trials.chunks_done(name) < trials.chunks]
        if not racing:  # the finalists have run on everything
            racing = [name for name in ordered if trials.chunks_done(name) < trials.chunks][:FINALISTS]
        if not racing:
            return
        done = min(map(trials.chunks_done, racing))
        trials.run([name for name in racing if trials.chunks_done(name) == done][:TOGETHER], done)
