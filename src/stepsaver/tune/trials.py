"""Candidates on the bench: each is a config of the tuning's experiment, stored like any other, beside the baseline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from stepsaver.bench.cells import CellRun, Opening, open_cells, run_missing
from stepsaver.bench.experiment import ConfigSpec
from stepsaver.bench.store import Timing
from stepsaver.bench.summarise import chunk_pairs, speed_ups
from stepsaver.tune.problems import Problems
from stepsaver.tune.race import Observed

BASELINE = "baseline"
BUSY = 0.5  # cores that other processes use while a chunk is timed: it then counts only if no chunk was quieter

Report = Callable[[str], None]  # told what is being run


@dataclass
class BenchTrials:
    """Runs candidates on some problems until a deadline; what is stored already costs nothing."""

    problems: Problems
    results: Path
    config_of: Callable[[str], ConfigSpec]
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
            baseline_of=dict.fromkeys(everybody, BASELINE),
        )

    def _open(self, names: Sequence[str]) -> None:
        new = [self.config_of(name) for name in names if name not in self.cells]
        if new:
            self.cells |= open_cells(self.problems.task_run, new, self.results, Opening(""))

    def observed(self, name: str) -> Observed | None:
        return self.observed_on(name, self.chunks)

    def observed_on(self, name: str, chunks: int) -> Observed | None:
        """Returns what is known of a candidate on the first chunks of the problems; None if it was not run on any."""
        if name not in self.cells:
            return None
        ours, baseline = self.cells[name], self.cells[BASELINE]
        shared = [each for each in self.problems.chunks[:chunks] if ours.has(each) and baseline.has(each)]
        if not shared:
            return None
        for chunk in shared:
            if (name, chunk.number) not in self.known:
                differences = self.problems.differences(ours, baseline, chunk)
                lost, won = (sum(max(0.0, side * each) for each in differences) for side in (1, -1))
                self.known[name, chunk.number] = (len(differences), lost, won)
        counts = [self.known[name, chunk.number] for chunk in shared]
        problems, lost, won = (sum(each[index] for each in counts) for index in range(3))
        numbers = {chunk.number for chunk in shared}
        pairs = [
            pair
            for pair in chunk_pairs(ours.stored.counting_timings, baseline.stored.counting_timings)
            if pair[0].chunk in numbers
        ]
        return Observed(int(problems), lost, won, smaller_speed_ups(pairs), _predicted(pairs))

    def seconds_per_problem(self, name: str) -> float | None:
        """Returns the mean over what is measured of a candidate so far; None if nothing is."""
        timings = self.cells[name].stored.own_timings if name in self.cells else []
        samples = sum(each.samples for each in timings)
        return sum(each.seconds for each in timings) / samples if samples else None


def smaller_speed_ups(pairs: list[tuple[Timing, Timing]]) -> tuple[float, ...]:
    """Returns a speed-up per undisturbed chunk, by tokens per second or by seconds per sample, whichever is smaller."""
    if not pairs:
        return ()
    newest = {ours.chunk: (ours, base) for ours, base in pairs}
    quiet = [pair for pair in newest.values() if all((each.other_cores or 0.0) < BUSY for each in pair)]
    return tuple(min(speed_ups(quiet or list(newest.values())).values(), key=fmean))


def _predicted(pairs: list[tuple[Timing, Timing]]) -> float | None:
    """Returns the speed-up per problem that this machine's row costs predict; None if they were not measured."""
    seconds = [[each.predicted_seconds or 0.0 for each in pair] for pair in pairs]
    if not seconds or not all(map(all, seconds)):
        return None
    return sum(base for _, base in seconds) / sum(ours for ours, _ in seconds)
