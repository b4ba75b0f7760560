"""Searches without a model: candidates whose true speed-up and drop are known, and a clock that the runs move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepsaver.tune.confirm import Attempt, Attempts, confirm
from stepsaver.tune.observed import Goal, Observed
from stepsaver.tune.search import search

CHUNK = 64
SEARCH_CHUNKS, FRESH = 20, 5120


@dataclass(frozen=True)
class Truth:
    speed_up: float
    lost: float  # shares of problems
    won: float

    @property
    def drop(self) -> float:
        return self.lost - self.won


class MemoryAttempts(Attempts):
    """Attempts that are on no disk."""

    def __init__(self) -> None:
        self.made: list[Attempt] = []

    def _write(self) -> None:
        pass


@dataclass
class SimulatedTrials:
    """A combination loses and wins the answers that its parts lose and win: what flatters one flatters all of them."""

    truths: Mapping[str, Truth]
    generator: np.random.Generator
    budget: float
    noise: float = 0.08  # of a chunk's speed-up
    chunks: int = SEARCH_CHUNKS
    counts: dict[str, np.ndarray] = field(default_factory=dict)  # lost, won
    speed_ups: dict[str, list[float]] = field(default_factory=dict)
    drawn: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)  # by part and chunk

    def run(self, names: Sequence[str], chunk: int) -> None:
        self.budget -= 1.0
        for name in names:
            assert self.chunks_done(name) == chunk, "nothing is run twice, and no chunk is left out"
            self.budget -= 1 / self.truths[name].speed_up
            lost_won = sum(self._of_part(part, chunk) for part in name.split("+"))
            self.counts[name] = self.counts.get(name, 0) + np.minimum(lost_won, CHUNK // 2)
            self.speed_ups.setdefault(name, []).extend(self._timed(name, 1))

    def _of_part(self, part: str, chunk: int) -> np.ndarray:
        if (part, chunk) not in self.drawn:
            self.drawn[part, chunk] = self.draw(self.truths[part], CHUNK)
        return self.drawn[part, chunk]

    def draw(self, truth: Truth, problems: int) -> np.ndarray:
        return self.generator.multinomial(problems, [truth.lost, truth.won, 1 - truth.lost - truth.won])[:2]

    def _timed(self, name: str, chunks: int) -> list[float]:
        noise = np.exp(self.generator.normal(0, self.noise, chunks))
        return (self.truths[name].speed_up * noise).tolist()  # type: ignore[no-any-return]

    def chunks_done(self, name: str) -> int:
        return len(self.speed_ups.get(name, ()))

    def observed(self, name: str) -> Observed | None:
        done = self.chunks_done(name)
        return Observed(done * CHUNK, *map(float, self.counts[name]), tuple(self.speed_ups[name])) if done else None

    def seconds_left(self) -> float:
        return self.budget

    def affordable(self, name: str, problems: int) -> int:
        return problems

    def run_first(self, name: str, problems: int) -> Observed | None:
        """What a confirmation sees: new draws of the same truth."""
        lost, won = map(float, self.draw(self.truths[name], problems))
        return Observed(problems, lost, won, tuple(self._timed(name, max(2, problems // CHUNK))))


@dataclass
class SimulatedSpace:
    """Single changes `0`, `1`, ... and their pairs, whose truths are there too. `a 0` and `a 1` are of one kind."""

    truths: Mapping[str, Truth]

    def singles(self) -> list[str]:
        return [name for name in self.truths if "+" not in name]

    def kind(self, name: str) -> str:
        return name.partition(" ")[0]

    def combinations(self, known: Mapping[str, Observed], goal: Goal) -> list[str]:
        gains = {name: goal.gain(each) for name, each in known.items()}
        pairs = [name for name in self.truths if "+" in name and all(part in gains for part in name.split("+"))]
        return sorted(pairs, key=lambda name: -sum(gains[part] for part in name.split("+")))[:12]


def with_pairs(singles: Mapping[str, Truth]) -> dict[str, Truth]:
    """All pairs too: faster than either, and less right than either."""
    names = list(singles)
    pairs = {
        f"{one}+{other}": Truth(
            singles[one].speed_up * singles[other].speed_up,
            min(0.5, singles[one].lost + singles[other].lost),
            min(0.4, singles[one].won + singles[other].won),
        )
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    }
    return {**singles, **pairs}


def tuned(truths: Mapping[str, Truth], goal: Goal, seed: int, budget: float = 250.0) -> Attempts:
    """Searches and confirms; returns the attempts."""
    trials = SimulatedTrials(truths, np.random.default_rng(seed), budget)
    attempts = MemoryAttempts()
    confirm(attempts, search(SimulatedSpace(truths), trials, goal), trials, goal)
    return attempts
