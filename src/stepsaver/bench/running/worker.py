"""Runs what is missing of one task: all configs in turn, chunk by chunk, in an order that rotates.

Every config so sees the same samples on the same machine in the same minutes. A config that runs without its baseline
has the baseline timed again on the same chunks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsaver.bench.experiment.spec import ConfigSpec, Experiment
from stepsaver.bench.machine.facts import machine_facts
from stepsaver.bench.results.identity import environment, git_state, library_versions, run_id, source_hash
from stepsaver.bench.results.store import Cell, open_cell
from stepsaver.bench.running.session import Chunk, ConfigRunner, Session, data_hash, make_chunks
from stepsaver.engine import kernels, registry
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.evaluate import EvaluationOptions
from stepsaver.evaluation.records import RequestRecord
from stepsaver.evaluation.task_loading import LoadedTask


@dataclass(frozen=True)
class CellRequest:
    """What identifies a cell besides its config: task, limit and everything that changes numbers."""

    experiment: Experiment
    session: Session
    task: LoadedTask
    limit: int | None
    chunks: tuple[Chunk, ...]
    data: str  # hash

    @property
    def folder_name(self) -> str:
        return self.task.name + (f"_limit_{self.limit}" if self.limit is not None else "")

    def identity(self, config: ConfigSpec) -> dict[str, Any]:
        spec, session = self.experiment.spec, self.session
        engine = session.engine(self.experiment, config)
        return {
            "model": session.model_hash,
            "layers": session.model.config.layers,
            "source": source_hash(),
            "libraries": library_versions(),
            "kernels": kernels.serve(session.model.dtype, session.device),
            "weights": session.weights,
            "rules": [registry.describe(rule) for rule in engine.rules],
            "policy": registry.describe(engine.policy),
            "decoding": asdict(engine.decoding),
            "task": self.task.name,
            "metric": self.task.accuracy,
            "num_fewshot": self.task.num_fewshot,
            "data": self.data,
            "limit": self.limit,
            "seed": spec.seed,
            "estimator": spec.estimator,
            "max_new_tokens": spec.decoding.max_new_tokens,
            "token_limit": spec.max_new_tokens,
            "dtype": str(session.model.dtype),
            "device": str(session.device),
            "batch_size": session.batch_size,
            "chunk_samples": spec.chunk_samples,
        }


def cell_request(experiment: Experiment, session: Session, task: LoadedTask, limit: int | None) -> CellRequest:
    """Asks the harness for the task's requests; nothing is run."""
    baseline = experiment.config(experiment.spec.baseline)
    lm = ConfigRunner(session, experiment, baseline, task.path).lm
    chunks = tuple(make_chunks(lm, task, EvaluationOptions(limit=limit), experiment.spec.chunk_samples))
    return CellRequest(experiment, session, task, limit, chunks, data_hash(chunks))


@dataclass
class OpenCell:
    """A config on a task: what is stored of it, and where this process writes, which is elsewhere in a shard."""

    runner: ConfigRunner
    identity: dict[str, Any]
    cell: Cell
    written: Cell

    def has(self, chunk: Chunk) -> bool:
        return chunk.number in self.cell.records or chunk.number in self.written.records


Progress = Callable[[str, int, int], None]  # config, chunks done, chunks in all


@dataclass(frozen=True)
class Opening:
    """Who opens the cells of a run, and which of them it starts afresh: once, however many processes it has."""

    label: str
    force: frozenset[str] = frozenset()


def open_cells(
    request: CellRequest, configs: Sequence[ConfigSpec], results: Path, opening: Opening
) -> dict[str, OpenCell]:
    opened: dict[str, OpenCell] = {}
    provenance = {
        "git": git_state(),
        "environment": environment(),
        "machine": machine_facts(request.session.device),
        "given": request.experiment.given,
    }
    for config in configs:
        identity = request.identity(config)
        folder = results / request.folder_name / config.name
        cell = open_cell(
            folder,
            identity,
            run_id(identity),
            force=config.name in opening.force,
            label=opening.label,
            provenance=provenance,
        )
        runner = ConfigRunner(request.session, request.experiment, config, request.task.path)
        opened[config.name] = OpenCell(runner, identity, cell, cell)
    return opened


def run_missing(
    cells: Mapping[str, OpenCell], chunks: Sequence[Chunk], progress: Progress, *, baseline_of: Mapping[str, str]
) -> None:
    """Runs those of some chunks that a cell lacks. The baselines have to be among the cells."""
    names = list(cells)
    assert {baseline_of[name] for name in names} <= cells.keys(), "a baseline is at hand, to be timed beside the others"
    for turn, chunk in enumerate(chunks):
        missing = {name for name in names if not cells[name].has(chunk)}
        if not missing:
            continue
        timed_beside = {baseline_of[name] for name in missing}
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name in missing or name in timed_beside:
                _run_chunk(cells[name], chunk, is_stored=name not in missing)
                progress(name, sum(map(cells[name].has, chunks)), len(chunks))


def _run_chunk(opened: OpenCell, chunk: Chunk, *, is_stored: bool) -> None:
    records, timing = opened.runner.run_chunk(chunk.requests, chunk=chunk.number, samples=len(chunk.samples))
    if not is_stored:
        opened.written.append_chunk(chunk.number, records, timing)
        return
    require_stored_answers(opened, chunk.number, records)
    opened.written.append_timing(timing)


def require_stored_answers(opened: OpenCell, chunk: int, records: Sequence[RequestRecord]) -> None:
    """A chunk that is timed again gives what it gave before."""
    stored = opened.cell.records.get(chunk) or opened.written.records[chunk]
    difference = first_difference(records, stored)
    if difference:
        raise UsageError(
            f"{opened.runner.config.name} gave another answer to {difference} than is stored of the same run: "
            f"the machine or a library is not what it was; set the results aside with `stepsaver discard`"
        )


def first_difference(records: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> str | None:
    """The first request that two runs of a chunk answered differently."""
    theirs = {record.key: record.ids for record in others}
    return next((str(each.key) for each in records if each.ids != theirs.get(each.key)), None)


def check_coverage(chunks: Sequence[Chunk], cell: Cell) -> None:
    """Every sample of the task exactly once, before anything is computed from them."""
    wanted = Counter((key.task, key.document) for chunk in chunks for key in chunk.samples)
    stored = Counter({(each.key.task, each.key.document) for each in cell.all_records})
    repeated = [key for key, count in Counter(each.key for each in cell.all_records).items() if count > 1]
    for what, samples in (("lacks", wanted - stored), ("should not have", stored - wanted)):
        if samples:
            task, document = min(samples)
            raise UsageError(f"{cell.folder} {what} {len(samples)} samples, such as {task} document {document}")
    if repeated:
        raise UsageError(f"{cell.folder} has {len(repeated)} answers twice, such as {repeated[0]}")
