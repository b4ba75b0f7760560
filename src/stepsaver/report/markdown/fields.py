"""The figures of a cell, of a task and of an experiment that a page can quote, and how they are written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any, NamedTuple

from stepsaver.bench.documents import Summary
from stepsaver.bench.statistics import Interval
from stepsaver.bench.verdict import is_control
from stepsaver.engine.errors import unknown_name
from stepsaver.report.cells import ReportCell, ReportTask

NOT_RUN = "not run yet"
Value = float | Interval | str | None


class Measured(NamedTuple):
    """A cell that is done."""

    task: ReportTask
    cell: ReportCell

    @property
    def summary(self) -> Summary:
        assert self.cell.summary is not None, "only what is done has figures"
        return self.cell.summary

    @property
    def is_compared(self) -> bool:
        """Whether it says something about its rules: baselines and controls do not."""
        return not self.summary.is_baseline and not is_control(self.summary)

    @property
    def drop(self) -> Interval:
        return self.summary.paired.drop_points


@dataclass(frozen=True)
class Field:
    heading: str  # of a table's column
    read: Callable[[Measured], Value]
    form: str = ""
    unit: str = ""
    of_baseline: str | None = None  # what a table shows for a baseline instead

    def text(self, several: Sequence[Measured]) -> str:
        """Returns the figure of one config; the smallest and the largest of several."""
        values = [value for value in map(self.read, several) if value is not None]
        if not values:
            return "-"
        if isinstance(values[0], str):
            return ", ".join(dict.fromkeys(map(str, values)))
        if len(values) == 1:
            return self._one(values[0])
        numbers = [value.value if isinstance(value, Interval) else value for value in values]
        ends = [self._number(number) + self.unit for number in (min(numbers), max(numbers))]
        return ends[0] if ends[0] == ends[1] else " to ".join(ends)

    def in_table(self, one: Measured) -> str:
        if self.of_baseline is not None and one.summary.is_baseline:
            return self.of_baseline
        return self.text([one])

    def _one(self, value: Value) -> str:
        if isinstance(value, Interval):
            if isnan(value.value):
                return "-"
            low, high = self._number(value.low), self._number(value.high)
            return f"{self._number(value.value)}{self.unit} [{low}, {high}]"
        return self._number(value) + self.unit

    def _number(self, value: Any) -> str:
        text = format(value, self.form)
        return text.removeprefix("-") if not text.strip("-0.%") else text  # there is no -0.0


def _value(read: Callable[[Measured], Interval | None]) -> Callable[[Measured], float | None]:
    def value(one: Measured) -> float | None:
        found = read(one)
        return None if found is None or isnan(found.value) else found.value

    return value


def _accuracy(one: Measured) -> Interval:
    return Interval(one.summary.accuracy, *one.summary.accuracy_interval)


def _speed_up(one: Measured) -> Interval:
    return one.summary.speed_up.smaller


def _rate(one: Measured) -> Interval | None:
    return one.summary.rate


def _left_out(one: Measured) -> float | None:
    """Returns the share of its baseline's row-layers that were not computed."""
    name = one.task.experiment.baseline_of(one.cell.name)
    whole = next((each.cost.row_layers for each in one.task.summaries if each.config == name), 0)
    return 1 - one.summary.cost.row_layers / whole if whole else None


def _outcome(one: Measured) -> str:
    judged = {each.config: each.outcome for each in one.task.verdict().configs}
    return judged.get(one.cell.name, "baseline")


FIELDS: dict[str, Field] = {
    "config": Field("config", lambda one: f"`{one.cell.name}`"),
    "experiment": Field("experiment", lambda one: f"`{one.task.experiment.name}`"),
    "task": Field("task", lambda one: f"`{one.task.folder}`"),
    "rules": Field("rules", lambda one: ", ".join(f"`{each}`" for each in _settings(one)) or "none"),
    "accuracy": Field("right", _value(_accuracy), ".1%"),
    "accuracy_interval": Field("right (95 %)", _accuracy, ".1%"),
    "drop": Field("drop", _value(lambda one: one.drop), ".1f", of_baseline=""),
    "drop_interval": Field("drop in points (95 %)", lambda one: one.drop, ".1f", of_baseline=""),
    "speed_up": Field("speed-up", _value(_speed_up), ".2f", "x", of_baseline="1.00x"),
    "speed_up_interval": Field("speed-up measured (95 %)", _speed_up, ".2f", "x", of_baseline="1.00x"),
    "rate": Field("tokens/s", _value(_rate), ",.0f"),
    "rate_interval": Field("tokens/s (95 %)", _rate, ",.0f"),
    "predicted": Field("predicted", lambda one: one.summary.predicted_speed_up, ".2f", "x", of_baseline=""),
    "predicted_here": Field("predicted here", lambda one: one.summary.predicted_here, ".2f", "x", of_baseline=""),
    "ceiling": Field("ceiling", lambda one: one.summary.ceiling, ".2f", "x", of_baseline=""),
    "left_out": Field("left out", _left_out, ".0%", of_baseline=""),
    "outcome": Field("verdict", _outcome),
    "samples": Field("samples", lambda one: one.summary.samples, ",.0f"),
    "batch_size": Field("batch", lambda one: one.summary.eval_params.batch_size, ".0f"),
    "chunks": Field("chunks", lambda one: one.summary.speed_up_chunks, ".0f"),
    "lost": Field("lost", lambda one: one.summary.paired.lost, ",.0f", of_baseline=""),
    "won": Field("won", lambda one: one.summary.paired.won, ",.0f", of_baseline=""),
}


def _settings(one: Measured) -> tuple[str, ...]:
    return (*one.cell.config.rules, *filter(None, [one.cell.config.policy]))


def field_named(name: str) -> Field:
    if name not in FIELDS:
        raise unknown_name("figure", name, FIELDS)
    return FIELDS[name]


TASK_FIELDS: dict[str, Callable[[ReportTask], str]] = {
    "verdict": lambda task: task.verdict().sentence,
    "outcome": lambda task: task.verdict().outcome,
    "samples": lambda task: f"{task.summaries[0].samples:,}",
    "configs": lambda task: str(len(task.done)),
    "date": lambda task: max(each.timestamp for each in task.summaries)[:10],
}


def status_text(tasks: Sequence[ReportTask], names: Sequence[str]) -> str:
    """Returns where an experiment stands: its verdict on each task that was run, and what is missing."""
    if not tasks:
        return "ready to run"
    done = [f"{task.verdict().outcome} on {task.folder}" + _of_how_many(task) for task in tasks]
    missing = [name for name in names if name not in {task.folder for task in tasks}]
    return "; ".join([f"run: {', '.join(done)}", *([f"{NOT_RUN}: {', '.join(missing)}"] if missing else [])])


def _of_how_many(task: ReportTask) -> str:
    return f" ({len(task.done)} of {len(task.cells)} configs)" if task.unfinished else ""
