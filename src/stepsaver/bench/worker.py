"""Runs what is missing of one task: all configs in turn, chunk by chunk, in an order that rotates.

Every config so sees the same samples on the same machine in the same minutes. A config that runs without its baseline
times the baseline again on the same chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepsaver.bench.identity import folder_hash, library_versions, run_id, source_hash
from stepsaver.bench.session import Chunk, ConfigRunner, Session, make_chunks
from stepsaver.bench.spec import ConfigSpec, Experiment
from stepsaver.bench.store import Cell, open_cell
from stepsaver.engine import registry
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.evaluate import EvaluationOptions
from stepsaver.evaluation.task_loading import LoadedTask


@dataclass(frozen=True)
class CellRequest:
    """What identifies a cell besides its config: task, limit and everything that changes numbers."""

    experiment: Experiment
    session: Session
    task: LoadedTask
    limit: int | None

    @property
    def folder_name(self) -> str:
        return self.task.name + (f"_limit_{self.limit}" if self.limit is not None else "")

    def identity(self, config: ConfigSpec) -> dict[str, Any]:
        spec, session = self.experiment.spec, self.session
        engine = session.engine(self.experiment, config)
        return {
            "model": folder_hash(session.folder),
            "layers": session.model.config.layers,
            "source": source_hash(),
            "libraries": library_versions(),
            "rules": [registry.describe(rule) for rule in engine.rules],
            "policy": registry.describe(engine.policy),
            "decoding": asdict(session.decoding),
            "task": self.task.name,
            "metric": self.task.accuracy,
            "limit": self.limit,
            "seed": spec.seed,
            "estimator": spec.estimator,
            "max_new_tokens": spec.decoding.max_new_tokens,
            "dtype": str(session.model.dtype),
            "device": str(session.model.device),
            "batch_size": session.batch_size,
            "chunk_samples": spec.chunk_samples,
        }


@dataclass
class OpenCell:
    runner: ConfigRunner
    cell: Cell
    identity: dict[str, Any]


Progress = Callable[[str, int, int], None]  # config, chunks done, chunks in all


def open_cells(
    request: CellRequest, configs: Sequence[ConfigSpec], results: Path, *, force: frozenset[str]
) -> dict[str, OpenCell]:
    opened: dict[str, OpenCell] = {}
    for config in configs:
        identity = request.identity(config)
        folder = results / request.folder_name / config.name
        cell = open_cell(folder, identity, run_id(identity), force=config.name in force)
        runner = ConfigRunner(request.session, request.experiment, config, request.task.path)
        opened[config.name] = OpenCell(runner, cell, identity)
    return opened


def task_chunks(request: CellRequest, cells: dict[str, OpenCell]) -> list[Chunk]:
    any_cell = next(iter(cells.values()))
    options = EvaluationOptions(limit=request.limit)
    return make_chunks(any_cell.runner.lm, request.task, options, request.experiment.spec.chunk_samples)


def run_missing(request: CellRequest, cells: dict[str, OpenCell], chunks: Sequence[Chunk], progress: Progress) -> None:
    """Runs every chunk that a cell lacks. The baseline has to be among the cells."""
    baseline = request.experiment.spec.baseline
    assert baseline in cells, "the baseline is always at hand, to be timed beside the others"
    names = list(cells)
    for turn, chunk in enumerate(chunks):
        missing = {name for name in names if chunk.number not in cells[name].cell.records}
        if not missing:
            continue
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if name in missing or name == baseline:
                _run_chunk(cells[name], chunk, is_stored=name not in missing)
                progress(name, len(cells[name].cell.records), len(chunks))


def _run_chunk(opened: OpenCell, chunk: Chunk, *, is_stored: bool) -> None:
    records, timing = opened.runner.run_chunk(chunk.requests, chunk=chunk.number, samples=len(chunk.samples))
    if not is_stored:
        opened.cell.append_chunk(chunk.number, records, timing)
        return
    stored = {record.key: record for record in opened.cell.records[chunk.number]}
    different = [str(each.key) for each in records if each.ids != stored[each.key].ids]
    if different:
        raise UsageError(
            f"the baseline gave another answer to {different[0]} than is stored of the same run: "
            f"the machine or a library is not what it was; set the results aside with `stepsaver discard`"
        )
    opened.cell.append_timing(timing)
