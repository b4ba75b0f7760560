"""Candidates on the bench: each is a config of the tuning's experiment, stored like any other, beside the baseline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import fmean

from stepsaver.bench.cells import CellRun, Opening, open_cells, run_missing
from stepsaver.bench.documents import Timing
from stepsaver.bench.experiment import ConfigSpec
from stepsaver.bench.session import Chunk
from stepsaver.bench.timings import chunk_pairs, speed_ups
from stepsaver.engine.errors import UsageError
from stepsaver.tune.observed import Observed
from stepsaver.tune.problems import Problems

BASELINE, REFERENCE = "baseline", "autoregressive"  # plain decoding, and the reference that no drop is judged by
REFERENCE_FRESH = 8  # fresh chunks on which the reference is timed
BUSY = 0.5  # cores that other processes use while a chunk is timed: it then counts only if no chunk was quieter

Report = Callable[[str], None]  # told what is being run


@dataclass
class BenchTrials:
    """Runs candidates on some problems until a deadline; what is stored already costs nothing."""

    problems: Problems
    results: Path
    config_of: Callable[[str], ConfigSpec | None]
    until: float  # on the monotonic clock
    report: Report
    cells: dict[str, CellRun] = field(default_factory=dict)
    known: dict[tuple[str, int], tuple[int, float, float]] = field(default_factory=dict)  # problems, lost, won
    turn: int = 0

    @property
    def chunks(self) -> int:
        return len(self.problems.chunks)

    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    def run(self, names: Sequence[str], chunk: int) -> None:
        """Runs candidates on a chunk, in an order that rotates from call to call, so that none is always the first."""
        everybody = [BASELINE, *names]
        self._open(everybody)
        start = self.turn % len(everybody)
        self.turn += 1
        cells = {name: self.cells[name] for name in everybody[start:] + everybody[:start]}
        run_missing(
            cells,
            [self.problems.chunks[chunk]],
            lambda name, done, total: self.report(name),
            beside=dict.fromkeys(everybody, (BASELINE,)),
        )

    def _open(self, names: Sequence[str]) -> None:
        new = [config for name in names if name not in self.cells and (config := self.config_of(name))]
        if new:
            self.cells |= open_cells(self.problems.task_run, new, self.results, Opening(""))

    def chunks_done(self, name: str) -> int:
        return len(self._done(name))

    def _done(self, name: str) -> list[Chunk]:
        """The first chunks, as far as both the candidate and the baseline have been run on them."""
        if name not in self.cells:
            return []
        ours, baseline = self.cells[name], self.cells[BASELINE]
        return list(takewhile(lambda chunk: ours.has(chunk) and baseline.has(chunk), self.problems.chunks))

    def observed(self, name: str, chunks: int | None = None) -> Observed | None:
        """Returns what is known of a candidate on the first chunks of the problems; None if it was not run on any."""
        done = self._done(name)[:chunks]
        if not done:
            return None
        counts = [self._counted(name, chunk) for chunk in done]
        problems, lost, won = (sum(each[index] for each in counts) for index in range(3))
        numbers = {chunk.number for chunk in done}
        ups, reference = self._speed_ups(name, numbers), self._speed_ups(REFERENCE, numbers)
        over = tuple(up / reference[chunk] for chunk, up in ups.items() if chunk in reference) if reference else None
        return Observed(int(problems), lost, won, tuple(ups.values()), over)

    def _counted(self, name: str, chunk: Chunk) -> tuple[int, float, float]:
        if (name, chunk.number) not in self.known:
            differences = self.problems.differences(self.cells[name], self.cells[BASELINE], chunk)
            lost, won = (sum(max(0.0, side * each) for each in differences) for side in (1, -1))
            self.known[name, chunk.number] = (len(differences), lost, won)
        return self.known[name, chunk.number]

    def _speed_ups(self, name: str, chunks: set[int]) -> dict[int, float]:
        """Returns a speed-up per chunk, by tokens per second or by seconds per sample, whichever is smaller."""
        if name not in self.cells:
            return {}
        pairs = chunk_pairs(self.cells[name].stored.counting_timings, self.cells[BASELINE].stored.counting_timings)
        newest = {pair[0].chunk: pair for pair in pairs if pair[0].chunk in chunks}
        quiet = {chunk: pair for chunk, pair in newest.items() if not any(map(_was_busy, pair))} or newest
        if not quiet:
            return {}
        smaller = min(speed_ups(list(quiet.values())), key=lambda ratios: fmean(each.value for each in ratios))
        return {each.chunk: each.value for each in smaller}

    def seconds_per_problem(self, name: str) -> float:
        """Returns the mean over what is measured of a candidate so far; 0 if nothing is."""
        timings = self.cells[name].stored.own_timings if name in self.cells else []
        return sum(each.seconds for each in timings) / max(sum(each.samples for each in timings), 1)


@dataclass
class FreshTrials:
    """Candidates on the problems that the search never saw."""

    trials: BenchTrials
    searched: BenchTrials

    def affordable(self, name: str, problems: int) -> int:
        """Returns how many of these problems, in whole chunks, the time left allows by the timings of the search."""
        counts = self._counts()
        baseline, ours, reference = map(self.searched.seconds_per_problem, (BASELINE, name, REFERENCE))
        left = self.trials.seconds_left() - reference * counts[:REFERENCE_FRESH][-1]
        most = max(left, 0.0) / max(baseline + ours, 1e-9)
        needed = next(count for count in counts if count >= problems)
        return max((count for count in counts if count <= min(needed, most)), default=0)

    def run_first(self, name: str, problems: int) -> Observed | None:
        if problems not in self._counts():
            raise UsageError(f"the attempt at {name} is of {problems} problems, which are no whole chunks")
        if self.trials.config_of(name) is None:
            return None
        chunks = self._counts().index(problems) + 1
        for chunk in range(chunks):
            self.trials.run([name, REFERENCE] if chunk < REFERENCE_FRESH else [name], chunk)
        return self.trials.observed(name, chunks)

    def _counts(self) -> list[int]:
        """How many problems the first chunks have: of one, of two, ..."""
        return list(accumulate(len(chunk.samples) for chunk in self.trials.problems.chunks))


def _was_busy(timing: Timing) -> bool:
    return (timing.other_cores or 0.0) >= BUSY
