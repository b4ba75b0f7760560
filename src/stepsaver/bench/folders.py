"""The names of task folders among the results: the task, and the limit if the run had one."""

import json
import re
import time
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


def stored_limits(results: Path, task: str) -> list[int]:
    """Returns the limits that a task was run with, the largest first."""
    names = (re.fullmatch(rf"{re.escape(task)}{LIMIT}(\d+)", path.name) for path in results.glob(f"{task}{LIMIT}*"))
    return sorted((int(name[1]) for name in names if name), reverse=True)


DISCARDED = "discarded.jsonl"


def experiments_folder() -> Path:
    """Returns `experiments/` in the current folder, else in the checkout that this package runs from."""
    here = Path.cwd() / "experiments"
    checkout = Path(__file__).resolve().parents[3] / "experiments"
    return here if here.is_dir() else checkout


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
    return read_experiment(folder, layers=_layers(folder))


def _layers(folder: Path) -> int | None:
    """Returns the number of layers of the experiment's own model, if it is on this machine."""
    try:
        return read_config(resolve_model(read_experiment(folder).spec.model, downloads=False)).layers
    except UsageError as error:
        if FILE in str(error):
            raise
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


def stored_configs(folder: Path, configs: list[str]) -> list[str]:
    """Returns those of the configs that have results in a task's folder."""
    return [name for name in configs if (folder / name).is_dir()]


def discard(experiment: Experiment, results: Path, cell_folder: str, configs: list[str], why: str) -> None:
    """Moves the results of configs to `discarded/` and records why."""
    for name in configs:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        target = results / cell_folder / "discarded" / f"{name}-{stamp}"
        target.parent.mkdir(parents=True, exist_ok=True)
        (results / cell_folder / name).rename(target)
        entry = {"when": stamp, "task": cell_folder, "config": name, "why": why, "moved_to": str(target)}
        with (experiment.folder / DISCARDED).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(entry) + "\n")
