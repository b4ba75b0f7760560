"""The options that commands on an experiment share, and what they choose."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stepsaver.engine.errors import UsageError, shown

TASK_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,99}")  # it becomes the name of a folder
MOST_SAMPLES = 1 << 30

if TYPE_CHECKING:
    from stepsaver.bench.experiment.spec import Experiment
    from stepsaver.report.cells import ReportTask


def add_cell_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a name under experiments/, or a folder")
    parser.add_argument("--task", action="append", metavar="T", help="only this task; may be repeated")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N samples of each (sub)task")
    parser.add_argument("--model", metavar="M", help="another model than the experiment's own")


def with_decoding(experiment: "Experiment", options: argparse.Namespace) -> "Experiment":
    """The experiment with the block size and the mask token that were given for a checkpoint that names none."""
    given = {name: value for name in ("block_size", "mask_id") if (value := getattr(options, name)) is not None}
    decoding = experiment.spec.decoding.model_copy(update=given)
    return replace(experiment, spec=experiment.spec.model_copy(update={"decoding": decoding}))


class Chosen(NamedTuple):
    """An experiment, where its results are, and the folder of each chosen task in there."""

    experiment: "Experiment"
    results: Path
    cell_folders: dict[str, str]

    def artifacts(self, folder: str) -> "ReportTask | None":
        """What was committed of a task, for a clone that has no results of it."""
        from stepsaver.report.artifacts import read_artifacts

        return read_artifacts(self.experiment, self.results, folder)

    def nothing_there(self) -> UsageError:
        return nothing_there(self.experiment, self.cell_folders.values())


def choose(options: argparse.Namespace, name: str | None = None) -> Chosen:
    """What the options choose of the experiment that they name, or of another one."""
    from stepsaver.bench.experiment.folders import find_experiment, results_folder

    experiment = find_experiment(name or options.experiment)
    results = results_folder(experiment, options.model or experiment.spec.model)
    tasks = chosen_tasks(options, experiment)
    return Chosen(experiment, results, {task: cell_folder(task, options.limit) for task in tasks})


def chosen_tasks(options: argparse.Namespace, experiment: "Experiment") -> tuple[str, ...]:
    if options.limit is not None and not 1 <= options.limit <= MOST_SAMPLES:
        raise UsageError(f"limit {shown(options.limit)} is not positive, or above {MOST_SAMPLES}")
    tasks = tuple(options.task or experiment.spec.tasks)
    wrong = next((task for task in tasks if not TASK_NAME.fullmatch(task)), None)
    if wrong is not None:
        raise UsageError(f"{shown(wrong)} is no name of a task; letters, digits, and any of _ . + -")
    return tasks


def nothing_there(experiment: "Experiment", folders: Iterable[str]) -> UsageError:
    return UsageError(f"{experiment.name} has no results of {', '.join(folders)} yet; run it first")


def cell_folder(task: str, limit: int | None) -> str:
    return task + (f"_limit_{limit}" if limit is not None else "")
