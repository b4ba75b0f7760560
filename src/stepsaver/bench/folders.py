"""Where experiments and their results are, and the names of the folders there."""

import re
from pathlib import Path

from stepsaver.bench.documents import Summary
from stepsaver.bench.experiment import Experiment
from stepsaver.bench.experiment_file import FILE, read_experiment
from stepsaver.bench.store import SUMMARY, read_summary
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.models.config import read_config
from stepsaver.evaluation.model_source import resolve_model

LIMIT = "_limit_"


def task_folder(task: str, limit: int | None) -> str:
    return task if limit is None else f"{task}{LIMIT}{limit}"


def split_task_folder(folder: str) -> tuple[str, int | None]:
    """Returns the task and the limit that a folder is named after."""
    task, _, limit = folder.rpartition(LIMIT)
    return (task, int(limit)) if task and limit.isdigit() else (folder, None)


def stored_limits(results: Path, task: str) -> list[int]:
    """Returns the limits that a task was run with, the largest first."""
    names = (re.fullmatch(rf"{re.escape(task)}{LIMIT}(\d+)", path.name) for path in results.glob(f"{task}{LIMIT}*"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


DISCARDED = "discarded.jsonl"  # what was set aside by hand, and why


def experiments_folder() -> Path:
    """Returns `experiments/` in the current folder, else in the checkout that this package runs from, to be read."""
    here, checkout = Path.cwd() / "experiments", Path(__file__).resolve().parents[3] / "experiments"
    return here if here.is_dir() else checkout


def folder_of_new(name: str) -> Path:
    """Returns where a new experiment is written: here, never to the checkout that this package happens to run from."""
    here = Path("experiments")
    return here / name if here.is_dir() else Path(name)


def experiment_names() -> list[str]:
    folder = experiments_folder()
    return sorted(path.parent.name for path in folder.glob(f"*/{FILE}")) if folder.is_dir() else []


def find_experiment(name: str) -> Experiment:
    """Returns the experiment of this name, or the one in the folder at this path."""
    folder = Path(name)
    if not (folder / FILE).exists():
        if name not in experiment_names():
            raise unknown_name("experiment", name, experiment_names() or ["none here"])
        folder = experiments_folder() / name
    return read_experiment(folder, layers=_layers)


def _layers(model: str) -> int | None:
    """Returns the number of a model's layers, if it is on this machine."""
    try:
        return read_config(resolve_model(model, downloads=False)).layers
    except UsageError:
        return None


def results_folder(experiment: Experiment, model: str) -> Path:
    """Returns the folder of a model's results. Models other than the experiment's own have a subfolder each."""
    results = experiment.folder.resolve() / "results"
    return results if model == experiment.spec.model else results / model.strip("/").replace("/", "__")


def logs_folder(experiment: Experiment) -> Path:
    return experiment.folder.resolve() / "logs"


def read_summaries(experiment: Experiment, results: Path, cell_folder: str) -> dict[str, Summary]:
    """Returns the summaries of a task by config, in the experiment's order; configs without one are left out."""
    found = {config.name: read_summary(results / cell_folder / config.name / SUMMARY) for config in experiment.configs}
    return {name: summary for name, summary in found.items() if summary is not None}
