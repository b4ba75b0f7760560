"""Running an experiment on this machine: every task, every config that is missing, summaries at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsaver.bench.equal import find_equal, follow
from stepsaver.bench.experiments import results_folder
from stepsaver.bench.session import Chunk, ConfigRunner, open_session
from stepsaver.bench.spec import ConfigSpec, Experiment
from stepsaver.bench.store import exclusive
from stepsaver.bench.summary import build_summary, score_cell
from stepsaver.bench.worker import CellRequest, OpenCell, Progress, open_cells, run_missing, task_chunks
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task

INVARIANCE_SAMPLES = 4


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
    chunks = task_chunks(request, cells)
    equal = find_equal(request, cells, chunks)
    run_missing(request, {name: cells[name] for name in cells if name not in equal.leader_of}, chunks, progress)
    checked = {name: follow(cells[name], cells[leader], chunks) for name, leader in equal.leader_of.items()}
    baseline = cells[experiment.spec.baseline]
    scored = {name: score_cell(request, opened) for name, opened in cells.items()}
    summaries = []
    for name, opened in cells.items():
        summary = build_summary(request, opened, baseline, scored[name], scored[experiment.spec.baseline])
        summary["inert_rules"] = [each._asdict() for each in equal.inert.get(name, ())]
        summary["equal_to"] = equal.leader_of.get(name)
        summary["spot_check"] = checked.get(name)
        summary["batch_invariance"] = batch_invariance(request, opened, chunks[0])
        opened.cell.write_summary(summary)
        summaries.append(summary)
    return summaries


def batch_invariance(request: CellRequest, opened: OpenCell, chunk: Chunk) -> dict[str, int]:
    """Decodes a few stored samples again, each alone, and counts those that come out differently."""
    session = replace(request.session, batch_size=1)
    alone = ConfigRunner(session, request.experiment, opened.runner.config, request.task.path)
    stored = {record.key: record for record in opened.cell.records[chunk.number]}
    few = [
        each for each in chunk.requests if each.doc_id in {key.document for key in chunk.samples[:INVARIANCE_SAMPLES]}
    ]
    different = 0
    for place in range(len(few)):
        records, _ = alone.run_chunk(few[place : place + 1], chunk=chunk.number, samples=1)
        different += any(
            each.ids != stored[each.key].ids or not _close(each.loglikelihood, stored[each.key].loglikelihood)
            for each in records
        )
    return {"samples": len(few), "different": different}


def _close(one: float | None, other: float | None) -> bool:
    return one is other or (one is not None and other is not None and abs(one - other) < 1e-4)


def _with_baseline(experiment: Experiment, configs: Sequence[ConfigSpec]) -> list[ConfigSpec]:
    baseline = experiment.config(experiment.spec.baseline)
    return [baseline, *(config for config in configs if config.name != baseline.name)]
