"""Runs an experiment, or one share of it: every task, all chunks that are missing, summaries when all are there."""

import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsaver.bench.cells import Opening, Progress, open_cells, repeat_disturbed, run_missing
from stepsaver.bench.durable import exclusive, merging
from stepsaver.bench.equal import find_equal
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.folders import results_folder
from stepsaver.bench.session import TaskRun, open_session, prepare_task
from stepsaver.bench.shards import Share, merge, merge_what_was_left, write_apart
from stepsaver.bench.stored_costs import read_row_costs, store_row_costs
from stepsaver.bench.summarise import summarise
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.other_work import not_idle, other_cores_now
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task


@dataclass(frozen=True)
class RunRequest:
    """Which part of an experiment is run, and how: the flags of `stepsaver run`, but not those about where it runs."""

    tasks: tuple[str, ...]
    configs: tuple[ConfigSpec, ...]
    model: str
    limit: int | None = None
    force: bool = False
    repeat_disturbed: bool = False
    data_dir: Path | None = None
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class Shard:
    """One process of a run, ready to be sent to another process or machine."""

    experiment: Experiment
    request: RunRequest
    share: Share

    @property
    def results(self) -> Path:
        return results_folder(self.experiment, self.request.model)

    def run(self, progress: Progress, *, loaded: Transformer | None = None) -> list[str]:
        """Runs what is missing of its share; stored chunks are not run again, so it may be stopped and run again.

        `loaded` is the run's model, if the process has it already.
        Returns the folders of the tasks that are complete now and have their summaries.
        """
        complete: list[str] = []
        # tasks first: what is wrong with them shows before a model is loaded
        tasks = [load(name, self.experiment, self.request) for name in self.request.tasks]
        with exclusive(self.results, with_shards=not self.share.is_whole):
            session = open_session(
                self.experiment, model_name=self.request.model, is_alone=self.share.is_alone, loaded=loaded
            )
            for task in tasks:
                task_run = prepare_task(self.experiment, session, task, self.request.limit)
                if _run_task(self, task_run, progress):
                    complete.append(task_run.folder_name)
        return complete


def make_shards(experiment: Experiment, request: RunRequest, count: int, *, share_machine: bool) -> list[Shard]:
    """Returns the shards of a run. If several share a machine, their timings cannot be compared."""
    label = time.strftime("%Y%m%dT%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]
    is_alone = count == 1 or not share_machine
    return [Shard(experiment, request, Share(label, index, count, is_alone)) for index in range(count)]


def log_progress(config: str, done: int, total: int) -> None:
    """Prints a line, for a shard without a terminal."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {config}: {done} of {total} chunks", flush=True)


def prepare(results: Path) -> None:
    """Makes sure, before anything is run, that nobody else runs, and merges what shards of earlier runs left."""
    with exclusive(results):
        _say(merge_what_was_left(results))


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def load(name: str, experiment: Experiment, request: RunRequest) -> LoadedTask:
    spec = experiment.spec
    return load_task(
        name,
        TaskOptions(
            data_dir=request.data_dir or spec.data_dir,
            num_fewshot=_of_task(spec.num_fewshot, name),
            metric=_of_task(spec.metric, name),
            confirm_run_unsafe_code=request.confirm_run_unsafe_code,
        ),
    )


def _of_task(value: Any, task: str) -> Any:
    """Returns a setting of the experiment for one of its tasks: the same for all, or by name."""
    return value.get(task) if isinstance(value, dict) else value


def _run_task(shard: Shard, task_run: TaskRun, progress: Progress) -> bool:
    """Runs a shard's chunks of a task. Returns whether all chunks are there now, including those of other shards."""
    share, results = shard.share, shard.results
    configs = with_baselines(shard.experiment, shard.request.configs)
    forced = frozenset(config.name for config in shard.request.configs) if shard.request.force else frozenset[str]()
    read_row_costs(results / task_run.folder_name)  # what cannot be read shows before anything is set aside
    with merging(results):
        cells = open_cells(task_run, configs, results, Opening(share.label, forced))
    _say(note for cell in cells.values() for note in cell.stored.notes)
    equal = find_equal(task_run, {name: cell.runner for name, cell in cells.items()})
    _say(f"{task_run.folder_name}: {note}" for note in equal.notes())
    computed = {name: cell for name, cell in cells.items() if name not in equal.leader_of}
    if not share.is_whole:
        write_apart(computed, share)
        _say(note for cell in computed.values() for note in cell.written.notes)
    baseline_of = {name: equal.computed_as(shard.experiment.baseline_of(name)) for name in cells}
    chunks = share.chunks(task_run.chunks)
    is_missing = not all(cell.has(chunk) for cell in computed.values() for chunk in chunks)
    if share.is_alone and (is_missing or shard.request.repeat_disturbed):
        _say(filter(None, [not_idle(other_cores_now())]))
        costs = task_run.session.measure_rows()
        with merging(results):
            store_row_costs(results / task_run.folder_name, task_run.session.identity, costs)
    run_missing(computed, chunks, progress, baseline_of=baseline_of)
    with merging(results):
        if not share.is_whole:
            merged = open_cells(task_run, configs, results, Opening(share.label))
            for name, cell in computed.items():
                merge(cell.written, merged[name].stored)
            cells = merged
        is_complete = all(chunk.number in cells[name].stored.records for name in computed for chunk in task_run.chunks)
        if is_complete and shard.request.repeat_disturbed:
            again = {name: cells[name] for name in computed}
            repeat_disturbed(task_run, again, progress, baseline_of=baseline_of)
        if is_complete:
            summarise(task_run, cells, equal)
    return is_complete


def with_baselines(experiment: Experiment, configs: Sequence[ConfigSpec]) -> list[ConfigSpec]:
    """Returns the configs, each after its baseline."""
    names = [name for config in configs for name in (experiment.baseline_of(config.name), config.name)]
    return [experiment.config(name) for name in dict.fromkeys(names)]
