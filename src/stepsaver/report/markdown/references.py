"""Figures by reference: `experiment/task/config field`, read from the committed artifacts.

A config may be a pattern (`window_*`: of several, without baselines and controls, the smallest and the largest figure
are written), several with commas, or `fastest`, the one with the greatest speed-up over the experiment's baseline;
`fastest<1.5` is the fastest whose drop surely stays below 1.5 points. In an experiment's own pages its name may be left
out.
"""

import re
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path

from stepsaver.bench.experiment import Experiment
from stepsaver.bench.folders import experiment_names, find_experiment
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.report.artifacts import read_artifacts
from stepsaver.report.cells import ReportTask
from stepsaver.report.markdown.fields import NOT_RUN, TASK_FIELDS, Field, Measured, field_named, status_text
from stepsaver.report.markdown.markers import table_lines
from stepsaver.report.markdown.measurements import MEASURED, measured_table, measured_value
from stepsaver.report.tables import markdown_table

FASTEST = re.compile(r"fastest(?:<(\d+(?:\.\d+)?))?")


class StoredExperiment:
    """An experiment and what is committed of it."""

    def __init__(self, name: str):
        self.experiment: Experiment = find_experiment(name)

    @cached_property
    def tasks(self) -> list[ReportTask]:
        results = self.experiment.folder / "results"
        found = (read_artifacts(self.experiment, results, folder) for folder in self.task_names)
        return [task for task in found if task is not None]

    @cached_property
    def task_names(self) -> list[str]:
        """The experiment's own tasks, then whatever else was saved."""
        folders = sorted(path.name for path in (self.experiment.folder / "artifacts").glob("*") if path.is_dir())
        return list(dict.fromkeys([*self.experiment.spec.tasks, *folders]))


stored_experiment = cache(StoredExperiment)


class Figures:
    """Answers the markers of one document; `measured` is where stored measurements are."""

    def __init__(self, measured: Path, own_experiment: str | None = None):
        self.measured = measured
        self.own_experiment = own_experiment

    def value(self, marker: str) -> str:
        """Returns the figure that belongs into a line."""
        reference, _, field = marker.strip().rpartition(" ")
        if reference.startswith(MEASURED):
            return measured_value(self.measured, reference, field)
        names = self._names(reference.strip())
        if len(names) == 1:
            return self._of_experiment(names[0], field)
        tasks = self._tasks(*names[:2])
        if len(names) == 2:
            if field not in TASK_FIELDS:
                raise unknown_name("figure of a task", field, TASK_FIELDS)
            return ", ".join(dict.fromkeys(map(TASK_FIELDS[field], tasks))) or NOT_RUN
        asked: Field = field_named(field)
        found = _chosen(tasks, names[2])
        if len(found) > 1:
            found = [each for each in found if each.is_compared]
        return asked.text(found) if found else NOT_RUN

    def table(self, marker: str) -> str:
        if marker.strip().startswith(MEASURED):
            return measured_table(self.measured, marker.strip())
        names, rows = table_lines(marker)
        fields = [field_named(name) for name in names]
        lines = [line for reference, label in rows for line in self._rows(reference, label, fields)]
        return markdown_table(lines, ("", *(field.heading for field in fields)))

    def _rows(self, reference: str, label: str, fields: list[Field]) -> list[tuple[str, ...]]:
        names = self._names(reference)
        if len(names) != 3:
            raise UsageError(f"{reference} does not name experiment, task and config")
        found = _chosen(self._tasks(*names[:2]), names[2])
        if not found:
            return [(label or f"`{names[2]}`", NOT_RUN, *[""] * (len(fields) - 1))]
        return [(label or f"`{each.cell.name}`", *(field.in_table(each) for field in fields)) for each in found]

    def _of_experiment(self, name: str, field: str) -> str:
        if field != "status":
            raise unknown_name("figure of an experiment", field, ["status"])
        stored = stored_experiment(name)
        return status_text(stored.tasks, stored.experiment.spec.tasks)

    def _names(self, reference: str) -> list[str]:
        """Returns experiment, task and config, as far as they are named; the experiment may be that of the page."""
        names = reference.split("/") if reference else []
        is_known = bool(names) and any(fnmatchcase(each, names[0]) for each in experiment_names())
        if self.own_experiment is not None and not is_known:
            names = [self.own_experiment, *names]
        if not 1 <= len(names) <= 3:
            raise UsageError(f"{reference!r} is no reference such as experiment/task/config")
        return names

    def _tasks(self, experiment: str, task: str) -> list[ReportTask]:
        names = [each for each in experiment_names() if fnmatchcase(each, experiment)]
        if not names:
            raise unknown_name("experiment", experiment, experiment_names() or ["none here"])
        stored = [stored_experiment(name) for name in names]
        known = [name for each in stored for name in each.task_names]
        if not any(fnmatchcase(name, task) for name in known):
            raise unknown_name("task", task, known)
        return [found for each in stored for found in each.tasks if fnmatchcase(found.folder, task)]


def _chosen(tasks: list[ReportTask], config: str) -> list[Measured]:
    """Returns the cells that are done and asked for."""
    everything = [Measured(task, cell) for task in tasks for cell in task.done]
    fastest = FASTEST.fullmatch(config)
    if fastest:
        most = float(fastest[1]) if fastest[1] else float("inf")
        safe = [each for each in everything if each.is_compared and each.drop.high < most]
        timed = [each for each in safe if each.summary.speed_up.smaller.value > 0 and _has_main_baseline(each)]
        return [max(timed, key=lambda each: each.summary.speed_up.smaller.value)] if timed else []
    patterns = config.split(",")
    known = {cell.name for task in tasks for cell in task.cells}
    for pattern in patterns:
        if known and not any(fnmatchcase(name, pattern) for name in known):
            raise unknown_name("config", pattern, known)
    return [each for each in everything if any(fnmatchcase(each.cell.name, pattern) for pattern in patterns)]


def _has_main_baseline(one: Measured) -> bool:
    """Whether it is compared with the experiment's baseline, so that its speed-up is one over plain decoding."""
    experiment = one.task.experiment
    return experiment.baseline_of(one.cell.name) == experiment.spec.baseline
