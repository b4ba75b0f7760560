"""Numbers that others published, beside a run of ours: as they reported them, with what is known to be wrong with each.

One file per source under `published/`. None of it is a result of ours: it enters no verdict and no figure.
"""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import Field

from stepsaver.bench.experiment import Strict
from stepsaver.report.blocks import Block, cell, notes, number, table
from stepsaver.report.cells import ReportTask
from stepsaver.report.parallelism import parallelism_of
from stepsaver.report.tables import markdown_table, or_dash

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

    def benchmark_of(self, task: str) -> Benchmark | None:
        return next((each for each in self.benchmarks if task in each.tasks), None)

    @property
    def tasks(self) -> list[str]:
        return [task for each in self.benchmarks for task in each.tasks]


def published_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_published(name: str) -> PublishedNumbers:
    content = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return PublishedNumbers.model_validate(content)


class _Row(NamedTuple):
    """A config as we ran it, if we did, and as it was reported, if it was."""

    config: str
    accuracy: float | None
    reported_accuracy: float | None
    tokens_per_s: float | None
    reported_tokens_per_s: float | None
    tokens_per_forward: float | None
    reported_tokens_per_forward: float | None
    faults: str

    def measures(self, benchmark: Benchmark) -> list[tuple[float | None, str]]:
        """Those beside accuracy that the benchmark has, with the format of each."""
        found: list[tuple[float | None, str]] = []
        if benchmark.has_rates or not benchmark.has_forwards:
            found += [(self.tokens_per_s, ".2f"), (self.reported_tokens_per_s, ".2f")]
        if benchmark.has_forwards:
            found += [(self.tokens_per_forward, ".2f"), (self.reported_tokens_per_forward, ".2f")]
        return found


def _rows(task: ReportTask, published: PublishedNumbers, benchmark: Benchmark) -> list[_Row]:
    summaries = {each.config: each for each in task.summaries}
    rows = []
    for name in dict.fromkeys([*summaries, *benchmark.results]):
        ours, theirs = summaries.get(name), benchmark.results.get(name)
        rate, parallelism = ours.rate if ours else None, parallelism_of(ours) if ours else None
        faults = [each.name for each in published.faults if theirs and each.concerns(benchmark.name, name)]
        rows.append(
            _Row(
                name,
                ours.accuracy if ours else None,
                theirs.accuracy if theirs else None,
                rate.value if rate else None,
                theirs.tokens_per_s if theirs else None,
                parallelism.tokens_per_step if parallelism else None,
                theirs.tokens_per_forward if theirs else None,
                ", ".join(faults),
            )
        )
    return rows


def _columns(task: ReportTask, benchmark: Benchmark) -> tuple[str, ...]:
    names = ["accuracy"]
    names += ["tokens/s"] if benchmark.has_rates or not benchmark.has_forwards else []
    names += ["TPF"] if benchmark.has_forwards else []
    sides = [f"{name}, {side}" for name in names for side in (task.experiment.name, "reported")]
    return ("config", *sides, "known faults")


def _caption(task: ReportTask, published: PublishedNumbers, benchmark: Benchmark) -> str:
    return (
        f"Reported by others, not measured by us: {published.title}; {published.model} on "
        f"{published.device or 'a device that is not said'}; {published.settings}; {benchmark}. "
        f"Here: {task.model}, {task.summaries[0].samples:,} samples of "
        f"{task.summaries[0].task} by {task.summaries[0].accuracy_metric}."
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


def published_blocks(task: ReportTask, published: PublishedNumbers) -> list[Block]:
    """The table and its faults for a page; nothing if the task has no published counterpart."""
    benchmark = published.benchmark_of(task.summaries[0].task)
    if benchmark is None:
        return []
    rows = [
        [
            cell(row.config, row.config),
            number(row.accuracy, ".2f", factor=100, suffix=" %"),
            number(row.reported_accuracy, ".2f", factor=100, suffix=" %"),
            *(number(value, how) for value, how in row.measures(benchmark)),
            cell(row.faults),
        ]
        for row in _rows(task, published, benchmark)
    ]
    items = [("reported", line) for line in _faults(published, benchmark)]
    caption = _caption(task, published, benchmark)
    return [
        table("Reported by others", _columns(task, benchmark), rows, caption=caption, name="published"),
        notes("What was wrong with the reported numbers", items, nothing="Nothing is known.", name="published_faults"),
    ]


def published_markdown(task: ReportTask, published: PublishedNumbers) -> str:
    """The same for `results.md`; empty if the task has no published counterpart."""
    benchmark = published.benchmark_of(task.summaries[0].task)
    if benchmark is None:
        return ""
    rows = [
        (
            row.config,
            or_dash(row.accuracy, ".2%"),
            or_dash(row.reported_accuracy, ".2%"),
            *(or_dash(value, how) for value, how in row.measures(benchmark)),
            row.faults,
        )
        for row in _rows(task, published, benchmark)
    ]
    parts = [
        "#### Reported by others",
        _caption(task, published, benchmark),
        markdown_table(rows, _columns(task, benchmark)),
    ]
    return "\n\n".join(
        [
            *parts,
            "What was wrong with the reported numbers:",
            "\n".join(f"- {line}" for line in _faults(published, benchmark)),
        ]
    )
