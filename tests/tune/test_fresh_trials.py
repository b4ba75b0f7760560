"""How many fresh problems an attempt takes, and beside what it is timed."""

from types import SimpleNamespace
from typing import Any

import pytest

from stepsaver.engine.errors import UsageError
from stepsaver.tune.observed import Observed
from stepsaver.tune.trials import REFERENCE_FRESH, FreshTrials

SIZES = [16] * 10 + [5]
SECONDS = {"baseline": 1.0, "fast": 0.5, "autoregressive": 2.0}


class Bench:
    """Stands for `BenchTrials`, and notes what was run."""

    def __init__(self, seconds: float) -> None:
        self.ran: list[tuple[list[str], int]] = []
        self.seconds = seconds
        self.problems = SimpleNamespace(chunks=[SimpleNamespace(samples=range(size)) for size in SIZES])

    def config_of(self, name: str) -> str | None:
        return name if name in SECONDS else None

    def seconds_left(self) -> float:
        return self.seconds

    def seconds_per_problem(self, name: str) -> float:
        return SECONDS.get(name, 0.0)

    def run(self, names: list[str], chunk: int) -> None:
        self.ran.append((names, chunk))

    def observed(self, name: str, chunks: int) -> Observed:
        return Observed(sum(SIZES[:chunks]), 0.0, 0.0, (1.5,))


def fresh(seconds: float = 0.0) -> tuple[FreshTrials, Bench]:
    bench: Any = Bench(seconds)
    return FreshTrials(bench, bench), bench


@pytest.mark.parametrize(
    ("seconds", "wanted", "problems"),
    [
        (1e6, 1, 16),
        (1e6, 16, 16),
        (1e6, 17, 32),
        (1e6, 165, 165),
        (256 + 24 * 1.5, 165, 16),
        (256 + 32 * 1.5, 165, 32),
        (256 + 15 * 1.5, 165, 0),
        (-5.0, 165, 0),
    ],
)
def test_whole_chunks_that_there_is_time_for(seconds: float, wanted: int, problems: int) -> None:
    """Eight chunks of 16 problems take the reference 256 seconds, and a problem takes the two others 1.5."""
    assert fresh(seconds)[0].affordable("fast", wanted) == problems


def test_the_reference_is_timed_on_the_first_chunks() -> None:
    trials, bench = fresh()
    seen = trials.run_first("fast", 165)
    assert seen is not None
    assert seen.problems == 165
    both, alone = ["fast", "autoregressive"], ["fast"]
    assert bench.ran == [(both if chunk < REFERENCE_FRESH else alone, chunk) for chunk in range(11)]


def test_what_nobody_knows_is_not_run_and_no_chunk_is_divided() -> None:
    trials, bench = fresh()
    assert trials.run_first("gone", 16) is None
    with pytest.raises(UsageError, match="20 problems, which are no whole chunks"):
        trials.run_first("fast", 20)
    assert bench.ran == []
