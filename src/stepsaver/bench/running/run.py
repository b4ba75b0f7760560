"""Running an experiment, or a part of it: every task, every config that is missing, summaries when all is there."""

import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepsaver.bench.running.equal import EqualConfigs, find_equal, follow
from stepsaver.bench.experiment.folders import results_folder
from stepsaver.bench.other_work import not_idle, other_cores_now
from stepsaver.bench.running.repeat import disturbed_chunks, repeat_disturbed
from stepsaver.bench.running.session import Chunk, ConfigRunner, open_session
from stepsaver.bench.running.shards import Part, merge, merge_what_was_left, write_apart
from stepsaver.bench.experiment.spec import ConfigSpec, Experiment
from stepsaver.bench.results.store import exclusive, merging
from stepsaver.bench.results.stored_costs import store_row_costs
from stepsaver.bench.running.summarise import build_summary, score_cell
from stepsaver.bench.running.worker import (
    CellRequest,
    OpenCell,
    Opening,
    Progress,
    cell_request,
    check_coverage,
    open_cells,
    run_missing,
)
from stepsaver.evaluation.task_loading import LoadedTask, TaskOptions, load_task

INVARIANCE_SAMPLES = 4

Summary = dict[str, Any]


@dataclass(frozen=True)
class RunOptions:
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
    """A part of a run, ready to be sent to another process or machine."""

    experiment: Experiment
    options: RunOptions
    part: Part

    @property
    def results(self) -> Path:
        return results_folder(self.experiment, self.options.model)

    def run(self, progress: Progress) -> list[str]:
        """Runs what is missing of the part; stored chunks are not run again, so it may be stopped and run again.

        Returns the folders of the tasks that are complete now and were summed up.
        """
        complete: list[str] = []
        # tasks first: what is wrong with them shows before a model is loaded
        tasks = [load(name, self.experiment, self.options) for name in self.options.tasks]
        with exclusive(self.results, with_shards=not self.part.is_whole):
            session = open_session(self.experiment, model_name=self.options.model, is_alone=self.part.is_alone)
            for task in tasks:
                request = cell_request(self.experiment, session, task, self.options.limit)
                if _run_task(self, request, progress):
                    complete.append(request.folder_name)
        return complete


def make_shards(experiment: Experiment, options: RunOptions, count: int, *, share_machine: bool) -> list[Shard]:
    label = time.strftime("%Y%m%dT%H%M%S-", time.gmtime()) + uuid.uuid4().hex[:6]
    is_alone = count == 1 or not share_machine
    return [Shard(experiment, options, Part(label, index, count, is_alone)) for index in range(count)]


def log_progress(config: str, done: int, total: int) -> None:
    """For a shard without a terminal."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {config}: {done} of {total} chunks", flush=True)


def prepare(results: Path) -> None:
    """Before anything is run: nobody else is, and no shard of an earlier run has something left to merge."""
    with exclusive(results):
        _say(merge_what_was_left(results))


def _say(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr, flush=True)


def load(name: str, experiment: Experiment, options: RunOptions) -> LoadedTask:
    spec = experiment.spec
    return load_task(
        name,
        TaskOptions(
            data_dir=options.data_dir or spec.data_dir,
            num_fewshot=_of_task(spec.num_fewshot, name),
            metric=_of_task(spec.metric, name),
            confirm_run_unsafe_code=options.confirm_run_unsafe_code,
        ),
    )


def _of_task(value: Any, task: str) -> Any:
    """A setting of the experiment for one of its tasks: the same for all, or by name."""
    return value.get(task) if isinstance(value, dict) else value


def _run_task(shard: Shard, request: CellRequest, progress: Progress) -> bool:
    """Says whether all chunks are there now, those of other shards included."""
    part, results = shard.part, shard.results
    configs = with_baselines(shard.experiment, shard.options.configs)
    forced = frozenset(config.name for config in shard.options.configs) if shard.options.force else frozenset[str]()
    with merging(results):
        cells = open_cells(request, configs, results, Opening(part.label, forced))
    _say(note for opened in cells.values() for note in opened.cell.notes)
    equal = find_equal(request, {name: opened.runner for name, opened in cells.items()})
    _say(f"{request.folder_name}: {note}" for note in equal.notes())
    computed = {name: opened for name, opened in cells.items() if name not in equal.leader_of}
    if not part.is_whole:
        write_apart(computed, part)
        _say(note for opened in computed.values() for note in opened.written.notes)
    baseline_of = {name: equal.computed_as(shard.experiment.baseline_of(name)) for name in cells}
    chunks = part.chunks(request.chunks)
    is_missing = not all(opened.has(chunk) for opened in computed.values() for chunk in chunks)
    if part.is_alone and (is_missing or shard.options.repeat_disturbed):
        _say(filter(None, [not_idle(other_cores_now())]))
        costs = request.session.measure_rows()
        with merging(results):
            store_row_costs(results / request.folder_name, request.session.identity, costs)
    run_missing(computed, chunks, progress, baseline_of=baseline_of)
    with merging(results):
        if not part.is_whole:
            merged = open_cells(request, configs, results, Opening(part.label))
            for name, opened in computed.items():
                merge(opened.written, merged[name].cell)
            cells = merged
        is_complete = all(chunk.number in cells[name].cell.records for name in computed for chunk in request.chunks)
        if is_complete and shard.options.repeat_disturbed:
            again = {name: cells[name] for name in computed}
            repeat_disturbed(request, again, progress, baseline_of=baseline_of)
        if is_complete:
            _summarise(request, cells, equal)
    return is_complete


def _summarise(request: CellRequest, cells: dict[str, OpenCell], equal: EqualConfigs) -> None:
    chunks = request.chunks
    checked = {name: follow(cells[name], cells[leader], chunks) for name, leader in equal.leader_of.items()}
    for opened in cells.values():
        check_coverage(chunks, opened.cell)
    disturbed = disturbed_chunks({name: each for name, each in cells.items() if name not in equal.leader_of})
    scored = {name: score_cell(request, opened) for name, opened in cells.items()}
    for name, opened in cells.items():
        # an equal config's timings stand for the baseline's: it was timed beside the others in every session
        baseline = equal.computed_as(request.experiment.baseline_of(name))
        summary = build_summary(request, opened, cells[baseline], scored[name], scored[baseline])
        summary["disturbed_chunks"] = sorted({each.chunk for each in disturbed if each.config == name})
        summary["inert_rules"] = [each._asdict() for each in equal.inert.get(name, ())]
        summary["equal_to"] = equal.leader_of.get(name)
        summary["spot_check"] = checked.get(name)
        summary["batch_invariance"] = batch_invariance(request, opened, chunks[0])
        opened.cell.write_summary(summary)


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


def with_baselines(experiment: Experiment, configs: Sequence[ConfigSpec]) -> list[ConfigSpec]:
    """The configs, each after what it is compared with."""
    names = [name for config in configs for name in (experiment.baseline_of(config.name), config.name)]
    return [experiment.config(name) for name in dict.fromkeys(names)]
