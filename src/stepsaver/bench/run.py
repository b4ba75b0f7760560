"""Running an experiment on this machine: every task, every config that is missing, summaries at the end."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsaver.bench.experiments import results_folder
from stepsaver.bench.session import open_session
from stepsaver.bench.spec import ConfigSpec, Experiment
from stepsaver.bench.store import exclusive
from stepsaver.bench.summary import build_summary, score_cell
from stepsaver.bench.worker import CellRequest, Progress, open_cells, run_missing, task_chunks
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task


@dataclass(frozen=True)
class RunOptions:
    tasks: tuple[str, ...]
    configs: tuple[ConfigSpec, ...]
    model: str
    limit: int | None = None
    force: bool = False
    data_dir: Path | None = None
    confirm_run_unsafe_code: bool = False


def run_experiment(experiment: Experiment, options: RunOptions, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """Runs what is missing. Returns the summaries of each task, the baseline's first."""
    # tasks first: what is wrong with them shows before a model is loaded
    tasks = [_load(name, experiment, options) for name in options.tasks]
    results = results_folder(experiment, options.model)
    spec = experiment.spec
    batch_size = spec.batch_size if options.model == spec.model else spec.batch_size_elsewhere
    with exclusive(results):
        session = open_session(experiment, model_name=options.model, batch_size=batch_size)
        return {
            task.name: _run_task(CellRequest(experiment, session, task, options.limit), options, results, progress)
            for task in tasks
        }


def _load(name: str, experiment: Experiment, options: RunOptions) -> LoadedTask:
    data_dir = options.data_dir or experiment.spec.data_dir
    return load_task(name, TaskOptions(data_dir=data_dir, confirm_run_unsafe_code=options.confirm_run_unsafe_code))


def _run_task(request: CellRequest, options: RunOptions, results: Path, progress: Progress) -> list[dict[str, Any]]:
    experiment = request.experiment
    configs = _with_baseline(experiment, options.configs)
    forced = frozenset(config.name for config in options.configs) if options.force else frozenset[str]()
    cells = open_cells(request, configs, results, force=forced)
    run_missing(request, cells, task_chunks(request, cells), progress)
    baseline = cells[experiment.spec.baseline]
    scored = {name: score_cell(request, opened) for name, opened in cells.items()}
    summaries = []
    for name, opened in cells.items():
        summary = build_summary(request, opened, baseline, scored[name], scored[experiment.spec.baseline])
        opened.cell.write_summary(summary)
        summaries.append(summary)
    return summaries


def _with_baseline(experiment: Experiment, configs: Sequence[ConfigSpec]) -> list[ConfigSpec]:
    baseline = experiment.config(experiment.spec.baseline)
    return [baseline, *(config for config in configs if config.name != baseline.name)]
