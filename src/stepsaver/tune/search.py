"""The search: single changes first, then combinations that these suggest, then a race over more and more problems.

The guarantee does not depend on it, only on `confirm.py`: a poor search finds less, but never promises more.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log2
from typing import Protocol

from stepsaver.tune.race import CAUTION, Goal, Observed

HOPELESS = 1.02  # no race could tell a speed-up below this from none
SHARE_OF_SINGLES, SHARE_OF_COMBINATIONS = 0.35, 0.2  # of the search's time; the race has the rest
TOGETHER = 6  # candidates that are timed beside one run of the baseline, before the race
MOST_COMBINATIONS = 24
LEAST_CHANCE = 0.05  # of being confirmed, to be worth fresh problems
SURVIVORS, LEAST_SURVIVORS = 0.5, 5  # of a rung: their share, and their number at least


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

    def seconds_left(self) -> float:
        """Returns what is left of the search's budget."""
        ...


class Space(Protocol):
    """What may be tried."""

    def singles(self) -> Sequence[str]:
        """Returns the candidates that differ from plain decoding in one thing, the cheapest of each kind first."""
        ...

    def family(self, name: str) -> str:
        """Returns the name of the group that stands or falls together: few problems flatter all of it at once."""
        ...

    def kind(self, name: str) -> Hashable:
        """Returns what a single change is a value of: a rule, a policy, ..."""
        ...

    def is_covered(self, name: str, hopeless: Sequence[str]) -> bool:
        """Whether a candidate is of the same kind as a hopeless one and costs at least as much."""
        ...

    def combinations(self, known: Mapping[str, Observed], goal: Goal, most: int) -> list[str]:
        """Returns the most promising combinations of single changes, by what is known about each change."""
        ...


@dataclass
class Found:
    """The result of a search."""

    ranked: list[tuple[str, Observed]] = field(default_factory=list)  # the most promising first
    out: dict[str, str] = field(default_factory=dict)  # by candidate, why it left
    aside: list[str] = field(default_factory=list)  # those of `out` that others only seemed to be better than
    never_run: list[str] = field(default_factory=list)  # for want of time


def search(space: Space, trials: Trials, goal: Goal) -> Found:
    """Tries candidates, and ranks them by the gain that can be expected to be confirmed."""
    found, budget = Found(), trials.seconds_left()
    tried = _try_singles(space, trials, found, goal, until=budget * (1 - SHARE_OF_SINGLES))
    until = trials.seconds_left() - budget * SHARE_OF_COMBINATIONS
    combined = space.combinations(_known(tried, trials), goal, MOST_COMBINATIONS)
    tried += _try_once(combined, trials, found, until=until)
    racing = [name for name, observed in _known(tried, trials).items() if _is_hopeful(name, observed, found)]
    found.ranked = _ranked(_known(_race(racing, space, trials, found, goal), trials), goal)
    while not found.ranked and found.aside and trials.seconds_left() > 0:
        found.ranked = _ranked(_known(_race_again(space, trials, found, goal), trials), goal)
    found.ranked = found.ranked or _ranked(_known(found.aside, trials), goal)
    for name, _ in found.ranked:
        found.out.pop(name, None)
    return found


def _ranked(standing: Mapping[str, Observed], goal: Goal) -> list[tuple[str, Observed]]:
    """Returns the most promising first; each further one, tried only if those before it fail, is likelier to hold."""
    ranked: list[tuple[str, Observed]] = []
    for name, observed in sorted(standing.items(), key=lambda each: -goal.expected_gain(each[1])):
        is_likelier = goal.chance(observed) > (goal.chance(ranked[-1][1]) if ranked else LEAST_CHANCE)
        if is_likelier and goal.expected_gain(observed) > 0:
            ranked.append((name, observed))
    return ranked


def _known(names: Sequence[str], trials: Trials) -> dict[str, Observed]:
    return {name: observed for name in names if (observed := trials.observed(name)) is not None}


def _try_singles(space: Space, trials: Trials, found: Found, goal: Goal, *, until: float) -> list[str]:
    """Runs a chunk of each, and returns those that ran: one of every kind first, then more of the kinds that promise
    most. If a setting is hopeless, none of its kind that costs as much or more is run.
    """
    tried: list[str] = []
    hopeless: list[str] = []
    waiting = list(space.singles())
    while waiting:
        covered = [name for name in waiting if space.is_covered(name, hopeless)]
        found.out |= dict.fromkeys(covered, "not run: a cheaper setting of its kind saves nothing here")
        waiting = [name for name in waiting if name not in covered]
        now, waiting = waiting[:TOGETHER], waiting[TOGETHER:]
        ran = _try_once(now, trials, found, until=until)
        hopeless += [name for name, each in _known(ran, trials).items() if each.expected_speed_up < HOPELESS]
        tried += ran
        waiting = _promising_kinds_first(waiting, space, _known(tried, trials), goal)
    return tried


def _promising_kinds_first(
    waiting: Sequence[str], space: Space, known: Mapping[str, Observed], goal: Goal
) -> list[str]:
    """Returns one of every kind that was not tried yet, then the rest, by the best that was seen of their kind."""
    best: dict[Hashable, float] = {}
    for name, observed in known.items():
        kind = space.kind(name)
        best[kind] = max(best.get(kind, -inf), goal.expected_gain(observed, caution=0.0))
    first = {space.kind(name): name for name in reversed(waiting) if space.kind(name) not in best}
    promise = {name: inf if name in first.values() else best.get(space.kind(name), -inf) for name in waiting}
    return sorted(waiting, key=lambda name: -promise[name])


def _try_once(names: Sequence[str], trials: Trials, found: Found, *, until: float) -> list[str]:
    """Runs the first chunk of candidates, a few at a time, while there is time. Returns those that ran."""
    ran: list[str] = []
    for start in range(0, len(names), TOGETHER):
        now = names[start : start + TOGETHER]
        if trials.seconds_left() <= until:
            found.never_run += now
        else:
            trials.run(now, 0)
            ran += now
    return ran


def _is_hopeful(name: str, observed: Observed, found: Found) -> bool:
    if observed.expected_speed_up >= HOPELESS:
        return True
    found.out[name] = f"it saves nothing here: {observed.expected_speed_up:.2f}x after {observed.problems} problems"
    return False


def _race(racing: list[str], space: Space, trials: Trials, found: Found, goal: Goal) -> list[str]:
    """Successive halving: each rung takes as long as the others, with half the candidates on twice the problems."""
    done = 1  # chunks
    rungs = max(1, ceil(log2(max(len(racing), 2) / LEAST_SURVIVORS)) + 2)
    for rung in range(rungs):
        racing = _survivors(racing, space, trials, found, goal, caution=CAUTION * rung / rungs)
        share = trials.seconds_left() / (rungs - rung)
        until = trials.seconds_left() - share
        while racing and done < trials.chunks and trials.seconds_left() > max(until, 0.0):
            trials.run(racing, done)
            done += 1
    return _inside(racing, trials, found, goal)


def _race_again(space: Space, trials: Trials, found: Found, goal: Goal) -> list[str]:
    """Races those set aside, once all that promised more fell. Each time fewer are set aside, so it ends."""
    racing, found.aside = found.aside, []
    for name in racing:
        del found.out[name]
    return _race(racing, space, trials, found, goal)


def _survivors(
    racing: list[str], space: Space, trials: Trials, found: Found, goal: Goal, *, caution: float
) -> list[str]:
    """Returns the more promising half of those that their intervals allow, and the most promising of each family."""
    known = _known(_inside(racing, trials, found, goal), trials)
    ordered = sorted(known, key=lambda name: -goal.expected_gain(known[name], caution))
    kept = max(LEAST_SURVIVORS, ceil(len(racing) * SURVIVORS))
    first = {space.family(name): name for name in reversed(ordered)}
    surviving = [name for rank, name in enumerate(ordered) if rank < kept or name in first.values()]
    for name in ordered:
        if name not in surviving:
            found.aside.append(name)
            found.out[name] = f"after {known[name].problems} problems others promised more"
    return surviving


def _inside(racing: Sequence[str], trials: Trials, found: Found, goal: Goal) -> list[str]:
    known = _known(racing, trials)
    best = goal.best_lower_bound(known.values())
    reasons = {name: reason for name, each in known.items() if (reason := goal.why_out(each, best))}
    found.out |= reasons
    return [name for name in known if name not in reasons]
