"""Searches without a model: candidates whose true speed-up and drop are known, and a clock that the runs move."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stepsaver.tune.race import Goal, Observed

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


@dataclass
class SimulatedTrials:
    truths: Mapping[str, Truth]
    generator: np.random.Generator
    budget: float
    noise: float = 0.08  # of a chunk's speed-up
    chunks: int = SEARCH_CHUNKS
    counts: dict[str, list[float]] = field(default_factory=dict)  # problems, lost, won
    speed_ups: dict[str, list[float]] = field(default_factory=dict)
    done: set[tuple[str, int]] = field(default_factory=set)  # candidates and chunks

    def run(self, names: Sequence[str], chunk: int) -> None:
        missing = [name for name in names if (name, chunk) not in self.done]
        self.done |= {(name, chunk) for name in missing}
        self.budget -= 1.0 if missing else 0.0
        for name in missing:
            truth = self.truths[name]
            self.budget -= 1 / truth.speed_up
            lost, won, _ = self.draw(truth, CHUNK)
            counts = self.counts.setdefault(name, [0, 0, 0])
            for place, count in enumerate((CHUNK, lost, won)):
                counts[place] += count
            self.speed_ups.setdefault(name, []).append(truth.speed_up * np.exp(self.generator.normal(0, self.noise)))

    def draw(self, truth: Truth, problems: int) -> Sequence[int]:
        shares = [truth.lost, truth.won, 1 - truth.lost - truth.won]
        return self.generator.multinomial(problems, shares).tolist()  # type: ignore[no-any-return]

    def observed(self, name: str) -> Observed | None:
        if name not in self.counts:
            return None
        problems, lost, won = self.counts[name]
        return Observed(int(problems), lost, won, tuple(self.speed_ups[name]), self.truths[name].speed_up)

    def seconds_left(self) -> float:
        return self.budget

    def fresh(self, name: str, number: int, problems: int) -> Observed:
        """What a confirmation sees: new draws of the same truth."""
        truth = self.truths[name]
        lost, won, _ = self.draw(truth, problems)
        ups = truth.speed_up * np.exp(self.generator.normal(0, self.noise, max(2, problems // CHUNK)))
        return Observed(problems, lost, won, tuple(ups.tolist()))


@dataclass
class SimulatedSpace:
    """Single changes `0`, `1`, ... and their pairs, whose truths are there too."""

    truths: Mapping[str, Truth]

    def singles(self) -> list[str]:
        return [name for name in self.truths if "+" not in name]

    def family(self, name: str) -> str:
        return name.partition("+")[0]

    def kind(self, name: str) -> str:
        return name

    def is_covered(self, name: str, hopeless: Sequence[str]) -> bool:
        return False

    def combinations(self, known: Mapping[str, Observed], goal: Goal, most: int) -> list[str]:
        gains = {name: goal.expected_gain(each) for name, each in known.items()}
        pairs = [name for name in self.truths if "+" in name and all(part in gains for part in name.split("+"))]
        return sorted(pairs, key=lambda name: -sum(gains[part] for part in name.split("+")))[:most]


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
