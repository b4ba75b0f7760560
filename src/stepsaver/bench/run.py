"""Runs an experiment, or one share of it: every task, all chunks that are missing, summaries when all are there.

A run may be divided over several processes: each runs all configs on its share of the chunks and writes to files of its
own, which are read as one (`store.py`). Who finds every chunk there when its share is done writes the summaries. If a
process dies for good, the next run goes on from what it left: no chunk is lost or counted twice.
"""

import json
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stepsaver.bench.cells import CellRun, Opening, Progress, open_cells, repeat_disturbed, run_missing
from stepsaver.bench.durable import exclusive, merging, write_beside
from stepsaver.bench.equal import find_equal
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.experiment_file import has_changed
from stepsaver.bench.folders import results_folder
from stepsaver.bench.session import Chunk, TaskRun, open_session, prepare_task
from stepsaver.bench.statistics import fewest_samples
from stepsaver.bench.summarise import summarise
from stepsaver.engine.curve import Curve, read_curve
from stepsaver.engine.machine import not_idle, other_cores_now
from stepsaver.engine.models.transformer import Transformer
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task

CURVE = "curve.json"  # in a task's folder: what forwards cost where it was run last


@dataclass(frozen=True)
class RunRequest:
    """Which part of an experiment is run, and how: the flags of `stepsaver run`, but not those about where it runs."""

    tasks: tuple[str, ...]
    configs: tuple[ConfigSpec, ...]
    model: str
    limit: int | None = None
    force: bool = False
    why: str = ""  # what is stored is set aside, for the record
    repeats: int = 1  # how often everything is timed, each time in a process of its own
    repeat_disturbed: bool = False
    curve: Curve | None = None  # what forwards cost, in place of measuring it
    data_dir: Path | None = None
    confirm_run_unsafe_code: bool = False


@dataclass(frozen=True)
class Shard:
    """One process of a run, ready to be sent to another process or machine: every `count`-th chunk from the `index`-th.

    A run by one process is its only shard.
    """

    experiment: Experiment
    request: RunRequest
    label: str  # of the run that it is part of
    index: int = 0
    count: int = 1
    is_alone: bool = True  # no other shard runs on this machine
    repeat: int = 0  # which of its repeats this is

    @property
    def results(self) -> Path:
        return results_folder(self.experiment, self.request.model)

    @property
    def part(self) -> str:
        return "" if self.count == 1 else f"{self.index + 1}of{self.count}"

    def chunks(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        return [chunk for chunk in chunks if chunk.number % self.count == self.index]

    def every_repeat(self) -> "list[Shard]":
        return [replace(self, repeat=repeat) for repeat in range(self.request.repeats)]

    @property
    def is_last(self) -> bool:
        return self.repeat == self.request.repeats - 1

    def run(self, progress: Progress, *, loaded: Transformer | None = None) -> list[str]:
        """Runs what is missing of its share; stored chunks are not run again, so it may be stopped and run again.

        `loaded` is the run's model, if the process has it already.
        Returns the folders of the tasks that are complete now and have their summaries.
        """
        # tasks first: what is wrong with them shows before a model is loaded
        tasks = [load(name, self.experiment, self.request) for name in self.request.tasks]
        with exclusive(self.results, part=self.part):
            session = open_session(
                self.experiment,
                model_name=self.request.model,
                is_alone=self.is_alone,
                repeat=self.repeat,
                loaded=loaded,
            )
            session.curve = self.request.curve
            runs = (prepare_task(self.experiment, session, task, self.request.limit) for task in tasks)
            complete = [each.folder_name for each in runs if _run_task(self, each, progress)]
        if has_changed(self.experiment):
            _say([f"{self.experiment.name}'s file changed meanwhile; these results are of what it said before"])
        return complete


def make_shards(experiment: Experiment, request: RunRequest, count: int, *, share_machine: bool) -> list[Shard]:
    """Returns the shards of a run. If several share a machine, their timings cannot be compared."""
    label = time.strftime("%Y%m%dT%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]
    is_alone = count == 1 or not share_machine
    return [Shard(experiment, request, label, index, count, is_alone) for index in range(count)]


def log_progress(config: str, done: int, total: int) -> None:
    """Prints a line, for a shard without a terminal."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {config}: {done} of {total} chunks", flush=True)


def refuse_beside_others(results: Path) -> None:
    """Makes sure, before anything is run, that nobody else runs."""
    with exclusive(results):
        pass


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def load(name: str, experiment: Experiment, request: RunRequest) -> LoadedTask:
    spec = experiment.spec
    return load_task(
        name,
        TaskOptions(
            data_dir=request.data_dir or spec.data_dir,
            num_fewshot=spec.of_task("num_fewshot", name),
            metric=spec.of_task("metric", name),
            confirm_run_unsafe_code=request.confirm_run_unsafe_code,
        ),
    )


def _run_task(shard: Shard, task_run: TaskRun, progress: Progress) -> bool:
    """Runs a shard's chunks of a task. Returns whether all chunks are there now, including those of other shards."""
    results, experiment = shard.results, shard.experiment
    configs = with_baselines(experiment, shard.request.configs, task_run.task.name)
    if not shard.repeat:
        _say(too_few_samples(task_run, configs))
    place = results / task_run.folder_name / CURVE
    stored = read_curve(place) if place.exists() else None  # a damaged one shows before anything is set aside
    equal = find_equal(task_run, configs)
    _say(f"{task_run.folder_name}: {note}" for note in equal.notes())
    beside = {
        config.name: [equal.computed_as(other) for other in experiment.timed_beside(config.name)] for config in configs
    }
    is_forced = shard.request.force and not shard.repeat
    forced = frozenset(config.name for config in shard.request.configs) if is_forced else frozenset[str]()

    def opened(*, force: frozenset[str] = frozenset()) -> dict[str, CellRun]:
        return open_cells(task_run, configs, results, Opening(shard.label, force, shard.request.why, shard.part))

    with merging(results):
        cells = opened(force=forced)
    _say(note for cell in cells.values() for note in cell.stored.notes)
    computed = {name: cell for name, cell in cells.items() if name not in equal.leader_of}
    chunks = shard.chunks(task_run.chunks)
    is_missing = not all(cell.has(chunk, shard.repeat) for cell in computed.values() for chunk in chunks)
    if shard.is_alone and (is_missing or shard.request.repeat_disturbed):
        _say(filter(None, [not_idle(other_cores_now())]))
        curve = task_run.session.measured_curve(stored)
        write_beside(place, json.dumps(curve.as_json()) + "\n")
    run_missing(computed, chunks, progress, beside=beside, repeat=shard.repeat)
    with merging(results):
        if shard.part:
            cells = opened()
            computed = {name: cells[name] for name in computed}
        is_complete = all(cell.has(chunk) for cell in computed.values() for chunk in task_run.chunks)
        if is_complete and shard.request.repeat_disturbed and shard.is_last:
            repeat_disturbed(task_run, computed, progress, beside=beside)
        if is_complete:
            summarise(task_run, cells, equal)
    return is_complete


def with_baselines(experiment: Experiment, configs: Sequence[ConfigSpec], task: str) -> list[ConfigSpec]:
    """Returns the configs that are run on a task, each after its baseline, and the reference."""
    there = {each.name for each in experiment.configs_on(task)}
    wanted = [config for config in configs if config.name in there]
    names = [name for config in wanted for name in (experiment.baseline_of(config.name), config.name)]
    return [experiment.config(name) for name in dict.fromkeys([*names, *filter(None, [experiment.reference])])]


def too_few_samples(task_run: TaskRun, configs: Sequence[ConfigSpec]) -> Iterator[str]:
    """Yields what a task has too few samples for: no answer of a run can be good enough to keep a bound."""
    experiment, samples = task_run.experiment, sum(len(chunk.samples) for chunk in task_run.chunks)
    judged = [each.name for each in configs if each.name not in experiment.baselines]
    for wanted in dict.fromkeys(experiment.success_of(name).confirm_if.drop_points for name in judged):
        if wanted.sign == "<" and 0 < wanted.bound < 100 and (least := fewest_samples(wanted.bound / 100)) > samples:
            yield (
                f"{task_run.folder_name} has {samples} samples, and to show a drop {wanted} points takes at least "
                f"{least}: this run will confirm nothing"
            )
