"""Numbers that others published, beside a run of ours: as they reported them, with what is known to be wrong with each.

One file per source under `published/`. None of it is a result of ours: it enters no verdict and no figure.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import Field

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Strict
from stepsaver.report.blocks import Block, cell, named, notes, number, table
from stepsaver.report.cells import ReportTask
from stepsaver.report.parallelism import parallelism_of

FOLDER = Path(__file__).parent / "published"


class Fault(Strict):
    """What is wrong with some of the numbers, and who says so."""

    name: str
    says: str
    text: str
    spoils: str
    configs: tuple[str, ...]  # patterns
    benchmarks: tuple[str, ...] = ()  # empty: all

    def concerns(self, benchmark: str, config: str) -> bool:
        is_there = not self.benchmarks or benchmark in self.benchmarks
        return is_there and any(fnmatchcase(config, pattern) for pattern in self.configs)


class PublishedResult(Strict):
    accuracy: float = Field(ge=0, le=1)
    tokens_per_s: float | None = None
    tokens_per_forward: float | None = None
    hours: float | None = None


class Benchmark(Strict):
    """What was not said with the numbers is None."""

    name: str
    tasks: tuple[str, ...]  # of ours that measure the same
    metric: str | None = None
    few_shot: int | None = None
    samples: int | None = None
    total_tokens: int | None = None
    results: dict[str, PublishedResult]

    @property
    def has_rates(self) -> bool:
        return any(each.tokens_per_s is not None for each in self.results.values())

    @property
    def has_forwards(self) -> bool:
        return any(each.tokens_per_forward is not None for each in self.results.values())

    def __str__(self) -> str:
        shots = "" if self.few_shot is None else f", {self.few_shot}-shot"
        samples = "" if self.samples is None else f", {self.samples:,} samples"
        return f"{self.name} by {self.metric or 'a metric that is not said'}{shots}{samples}"


class PublishedNumbers(Strict):
    title: str
    model: str
    device: str | None = None
    settings: str
    faults: tuple[Fault, ...]
    benchmarks: tuple[Benchmark, ...]

    def benchmarks_of(self, task: str) -> list[Benchmark]:
        return [each for each in self.benchmarks if task in each.tasks]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for each in self.benchmarks for task in each.tasks))


def published_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_published(name: str) -> PublishedNumbers:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return PublishedNumbers.model_validate(content)


def published_blocks(task: ReportTask, published: PublishedNumbers) -> list[Block]:
    """Returns each table of the task's published counterparts and its faults."""
    found = published.benchmarks_of(task.summaries[0].task)
    return [block for benchmark in found for block in _benchmark_blocks(task, published, benchmark)]


def _benchmark_blocks(task: ReportTask, published: PublishedNumbers, benchmark: Benchmark) -> list[Block]:
    summaries = {each.config: each for each in task.summaries}
    measures = [_ACCURACY, *([_RATE] if benchmark.has_rates or not benchmark.has_forwards else [])]
    measures += [_FORWARDS] if benchmark.has_forwards else []
    rows = []
    for name in dict.fromkeys([*summaries, *benchmark.results]):
        ours, theirs = summaries.get(name), benchmark.results.get(name)
        faults = [each.name for each in published.faults if theirs and each.concerns(benchmark.name, name)]
        entries = [
            number(value, ".2f", factor=each.factor, suffix=each.suffix)
            for each in measures
            for value in (each.ours(ours) if ours else None, each.theirs(theirs) if theirs else None)
        ]
        rows.append([named(name), *entries, cell(", ".join(faults))])
    sides = [f"{each.name}, {side}" for each in measures for side in (task.experiment.name, "reported")]
    columns, caption = ("config", *sides, "known faults"), _caption(task, published, benchmark)
    items = [("reported", line) for line in _faults(published, benchmark)]
    title = f"What was wrong with the reported numbers: {benchmark.name}"
    return [
        table(f"Reported by others: {benchmark.name}", columns, rows, caption=caption, name="published"),
        notes(title, items, nothing="Nothing is known.", name="published_faults"),
    ]


class _Measure(NamedTuple):
    name: str
    ours: Callable[[Summary], float | None]
    theirs: Callable[[PublishedResult], float | None]
    factor: float = 1.0
    suffix: str = ""


_ACCURACY = _Measure("accuracy", lambda one: one.accuracy, lambda one: one.accuracy, 100, " %")
_RATE = _Measure("tokens/s", lambda one: one.rate.value if one.rate else None, lambda one: one.tokens_per_s)
_FORWARDS = _Measure(
    "TPF",
    lambda one: found.tokens_per_step if (found := parallelism_of(one)) else None,
    lambda one: one.tokens_per_forward,
)


def _caption(task: ReportTask, published: PublishedNumbers, benchmark: Benchmark) -> str:
    first = task.summaries[0]
    return (
        f"Reported by others, not measured by us: {published.title}; {published.model} on "
        f"{published.device or 'a device that is not said'}; {published.settings}; {benchmark}. "
        f"Here: {task.model}, {first.samples:,} samples of {first.task} by {first.accuracy_metric}."
    )


def _faults(published: PublishedNumbers, benchmark: Benchmark) -> list[str]:
    """What is wrong with the numbers of a benchmark, and with those of which configs."""
    lines = []
    for fault in published.faults:
        names = [name for name in benchmark.results if fault.concerns(benchmark.name, name)]
        if names:
            which = "all configs" if len(names) == len(benchmark.results) else ", ".join(names)
            lines.append(f"{fault.name} ({which}): {fault.text}. Spoils {fault.spoils}. Says {fault.says}.")
    return lines
