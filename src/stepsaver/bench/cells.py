"""Runs what is missing of one task: all configs in turn, chunk by chunk, in an order that rotates.

So every config sees the same samples on the same machine in the same minutes. If a config lacks chunks that its
baseline or the reference has, these are timed again on them.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepsaver.bench.documents import Identity, Provenance, Timing
from stepsaver.bench.experiment import ConfigSpec, Experiment
from stepsaver.bench.folders import DISCARDED
from stepsaver.bench.identity import environment, git_state, machine_facts, run_id
from stepsaver.bench.session import Chunk, ConfigRunner, TaskRun
from stepsaver.bench.store import CellFiles, open_cell_files
from stepsaver.bench.timings import Slow, slow_chunks
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestRecord

Progress = Callable[[str, int, int], None]  # config, chunks done, chunks in all


@dataclass
class CellRun:
    """A cell that is being run."""

    runner: ConfigRunner
    identity: Identity
    stored: CellFiles

    def has(self, chunk: Chunk, repeat: int = 0) -> bool:
        """Whether a chunk's samples are stored, or the timing of a repeat."""
        return chunk.number in self.stored.records if not repeat else (chunk.number, repeat) in self.stored.repeated


@dataclass(frozen=True)
class Opening:
    """The run that opens cells, and those that it starts afresh: once, however many processes it has."""

    label: str
    force: frozenset[str] = frozenset()
    why: str = ""  # the results of those are set aside, for the record
    part: str = ""  # of this process, if others run their share of the chunks


def open_cells(task_run: TaskRun, configs: Sequence[ConfigSpec], results: Path, opening: Opening) -> dict[str, CellRun]:
    """Opens the cell of every config, and returns them by name."""
    cells: dict[str, CellRun] = {}
    provenance = Provenance(
        git=git_state(),
        environment=environment(),
        machine=machine_facts(task_run.session.device),
        given=task_run.experiment.given,
    )
    for config in configs:
        identity = task_run.identity(config)
        stored = open_cell_files(
            results / task_run.folder_name / config.name,
            identity,
            run_id(identity),
            provenance=provenance,
            force=config.name in opening.force,
            label=opening.label,
            part=opening.part,
        )
        if stored.set_aside and opening.why:
            _record(task_run.experiment, task_run.folder_name, config.name, opening.why, stored.set_aside)
        cells[config.name] = CellRun(task_run.runner(config), identity, stored)
    return cells


def _record(experiment: Experiment, task: str, config: str, why: str, moved_to: Path) -> None:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    entry = {"when": stamp, "task": task, "config": config, "why": why, "moved_to": str(moved_to)}
    with (experiment.folder / DISCARDED).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def run_missing(
    cells: Mapping[str, CellRun],
    chunks: Sequence[Chunk],
    progress: Progress,
    *,
    beside: Mapping[str, Sequence[str]],
    repeat: int = 0,
) -> None:
    """Runs the chunks that a cell lacks, or times those that it lacks of a repeat. What is timed beside each cell has
    to be among the cells.
    """
    names = list(cells)
    assert {other for name in names for other in beside[name]} <= cells.keys(), "what is timed beside them is at hand"
    for turn, chunk in enumerate(chunks):
        missing = {name for name in names if not cells[name].has(chunk, repeat)}
        if not missing:
            continue
        timed_beside = {other for name in missing for other in beside[name]}
        start = (turn + repeat) % len(names)
        for name in names[start:] + names[:start]:
            if name in missing or name in timed_beside:
                _run_chunk(cells[name], chunk, is_stored=cells[name].has(chunk))
                progress(name, sum(cells[name].has(each, repeat) for each in chunks), len(chunks))


def _run_chunk(cell: CellRun, chunk: Chunk, *, is_stored: bool) -> None:
    records, timing = cell.runner.run_chunk(chunk.requests, chunk=chunk.number, samples=len(chunk.samples))
    if not is_stored:
        cell.stored.append_chunk(chunk.number, records, timing)
        return
    require_stored_answers(cell, chunk.number, records)
    cell.stored.append_timing(timing)


def require_stored_answers(cell: CellRun, chunk: int, records: Sequence[RequestRecord]) -> None:
    """Raises if a chunk that was timed again did not give what it gave before."""
    theirs = {record.key: record.ids for record in cell.stored.records[chunk]}
    difference = next((each.key for each in records if each.ids != theirs.get(each.key)), None)
    if difference:
        raise UsageError(
            f"{cell.runner.config.name} gave another answer to {difference} than is stored of the same run: "
            f"the machine or a library is not what it was; `stepsaver run --force --why TEXT` sets the results aside"
        )


def check_coverage(chunks: Sequence[Chunk], files: CellFiles) -> None:
    """Raises unless every sample of the task is stored exactly once, before anything is computed from them."""
    wanted = Counter((key.task, key.document) for chunk in chunks for key in chunk.samples)
    stored = Counter({(each.key.task, each.key.document) for each in files.all_records})
    repeated = [key for key, count in Counter(each.key for each in files.all_records).items() if count > 1]
    for what, samples in (("lacks", wanted - stored), ("should not have", stored - wanted)):
        if samples:
            task, document = min(samples)
            raise UsageError(f"{files.folder} {what} {len(samples)} samples, such as {task} document {document}")
    if repeated:
        raise UsageError(f"{files.folder} has {len(repeated)} answers twice, such as {repeated[0]}")


def repeat_disturbed(
    task_run: TaskRun, cells: Mapping[str, CellRun], progress: Progress, *, beside: Mapping[str, Sequence[str]]
) -> None:
    """Times again the chunks in which a config was disturbed, with what is timed beside it; if one of these was, all
    configs that it is compared with.

    The answers have to be the same, and both timings stay on record. The later one counts whatever it says; otherwise
    repeating would be choosing. Its line in `trace.jsonl` names the session of the timing that it replaces.
    """
    turns: dict[tuple[str, int], list[str]] = {}
    for each in disturbed_chunks(cells):
        turns.setdefault((each.session, each.chunk), []).append(each.config)
    for turn, ((session, chunk), configs) in enumerate(turns.items(), start=1):
        timed = [name for name, cell in cells.items() if _has_timing(cell, session, chunk)]
        replaced = [name for name in timed if {name, *beside[name]} & {*configs}]
        label = f"{task_run.session.identity}.{turn}"  # pairs them with each other, and with no other timing
        names = list(dict.fromkeys([*(other for name in replaced for other in beside[name]), *replaced]))
        start = turn % len(names)
        found = {name: _time_again(task_run, cells[name], chunk) for name in names[start:] + names[:start]}
        for name, timing in found.items():  # stored at the end, so that hardly anything can come between a pair
            instead = {"instead_of": session} if name in replaced else {}
            cells[name].stored.append_timing(timing.model_copy(update={"session": label, **instead}))
        progress("timed again", turn, len(turns))


def disturbed_chunks(cells: Mapping[str, CellRun]) -> list[Slow]:
    timings = {name: cell.stored.counting_timings for name, cell in cells.items()}
    return [each for each in slow_chunks(timings) if each.is_disturbed]


def _has_timing(cell: CellRun, session: str, chunk: int) -> bool:
    return any(each.key == (chunk, session) for each in cell.stored.counting_timings)


def _time_again(task_run: TaskRun, cell: CellRun, number: int) -> Timing:
    chunk = next(each for each in task_run.chunks if each.number == number)
    records, timing = cell.runner.run_chunk(chunk.requests, chunk=number, samples=len(chunk.samples))
    require_stored_answers(cell, number, records)
    return timing
