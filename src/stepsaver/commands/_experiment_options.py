"""The flags that commands on an experiment share, and what they choose."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepsaver.engine.errors import UsageError, shown

TASK_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")  # it becomes the name of a folder
MOST_SAMPLES = 1 << 30

if TYPE_CHECKING:
    from stepsaver.bench.experiment import Experiment
    from stepsaver.report.cells import ReportTask


def add_cell_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name under experiments/, or a folder")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N samples of each (sub)task")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")


def with_decoding(experiment: "Experiment", options: argparse.Namespace) -> "Experiment":
    """Returns the experiment with the block size and mask token that were given for a checkpoint that names none."""
    given = {name: value for name in ("block_size", "mask_id") if (value := getattr(options, name)) is not None}
    decoding = experiment.spec.decoding.model_copy(update=given)
    return replace(experiment, spec=experiment.spec.model_copy(update={"decoding": decoding}))


class Chosen(NamedTuple):
    """An experiment, where its results are, and the folder of each chosen task in there."""

    experiment: "Experiment"
    results: Path
    cell_folders: dict[str, str]

    def artifacts(self, folder: str) -> "ReportTask | None":
        """Returns what was committed of a task, for a clone that has no results of it."""
        from stepsaver.report.artifacts import read_artifacts

        return read_artifacts(self.experiment, self.results, folder)

    def nothing_there(self) -> UsageError:
        folders = ", ".join(self.cell_folders.values())
        return UsageError(f"{self.experiment.name} has no results of {folders} yet; run it first")


def choose(options: argparse.Namespace, name: str | None = None) -> Chosen:
    """Returns what the flags choose of the experiment that they name, or of the one called `name`."""
    from stepsaver.bench.folders import find_experiment

    experiment = find_experiment(name or options.experiment)
    return chosen_of(experiment, chosen_tasks(options, experiment), limit=options.limit, model=options.model)


def chosen_of(experiment: "Experiment", tasks: Sequence[str], *, limit: int | None, model: str | None = None) -> Chosen:
    """Returns some tasks of an experiment, with its own model unless another one is named."""
    from stepsaver.bench.folders import results_folder, task_folder

    if limit is not None and not 1 <= limit <= MOST_SAMPLES:
        raise UsageError(f"limit {shown(limit)} is not positive, or above {MOST_SAMPLES}")
    results = results_folder(experiment, model or experiment.spec.model)
    return Chosen(experiment, results, {task: task_folder(task, limit) for task in tasks})


def chosen_tasks(options: argparse.Namespace, experiment: "Experiment") -> tuple[str, ...]:
    tasks = tuple(options.task or experiment.spec.tasks)
    wrong = next((task for task in tasks if not TASK_NAME.fullmatch(task)), None)
    if wrong is not None:
        raise UsageError(f"{shown(wrong)} is not the name of a task; letters, digits, and any of _ . + -")
    return tasks
