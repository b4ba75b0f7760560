"""Results on disk: one folder per config and task, samples appended chunk by chunk, a summary written at the end.

A chunk is stored as its line in `trace.jsonl`, then its samples in one write and one sync, ended by a closing line.
What follows the last closing line is the tail of an unfinished write and is cut off before the next one. Every file
names its run and every line has a checksum (`checksums.py`): nothing is read from a run with another id, and what was
altered is set aside, reported, and run again.

A process that shares a run with others writes to files of its own (`samples-2of8.jsonl`), and nothing is ever moved:
what is stored of a cell is what all its files hold together.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stepsaver.bench.checksums import (
    Line,
    document_holds,
    first_line,
    last_sum,
    read_lines,
    reseal,
    seal,
    seal_document,
)
from stepsaver.bench.documents import Identity, Provenance, RunDocument, StoredScore, Summary, Timing
from stepsaver.bench.durable import append_synced, cannot_write, write_beside
from stepsaver.bench.identity import differing_parts
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.evaluate import DocumentScore
from stepsaver.evaluation.records import RequestRecord, record_from_json, record_to_json

SAMPLES, TRACE, SCORES, SUMMARY, IDENTITY = "samples.jsonl", "trace.jsonl", "scores.jsonl", "summary.json", "run.json"
DAMAGED, OTHER_RUN = "damaged", "other-run"  # what is added to the name of a file that is set aside
ALTERED = "was changed, put in or doubled, or the line before it was taken out"


def part_name(name: str, part: str) -> str:
    """Returns the name of a process's own file, such as `samples-2of8.jsonl`; a process alone has no part."""
    stem, _, ending = name.partition(".")
    return f"{stem}-{part}.{ending}" if part else name


class StoredFile(NamedTuple):
    path: Path
    is_ours: bool  # it says that it is of this run
    head: Line | None  # the first line, which names the run
    lines: list[Line]  # the others
    tail: bytes  # of an unfinished write

    def faults(self) -> list[str]:
        """Returns what is wrong with it: that it is not of this run, or the lines that do not hold."""
        name, head = self.path.name, self.head
        if self.is_ours:
            return [f"{name} line {line.number} {ALTERED}" for line in self.lines if not line.holds]
        if head and head.holds and head.content.get("file") == name:
            return [f"{name} is of run {head.content.get('run')}"]
        return [f"{name} does not say which run it is of"]


class StoredChunk(NamedTuple):
    number: int
    session: str
    records: list[RequestRecord]
    lines: list[Line]


def read_file(path: Path, run_id: str) -> StoredFile:
    try:
        lines, tail = read_lines(path.read_bytes() if path.exists() else b"")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if not lines:
        return StoredFile(path, True, None, [], tail)
    head = lines[0]
    return StoredFile(path, head.holds and head.content == first_line(path.name, run_id), head, lines[1:], tail)


def _read_parts(folder: Path, name: str, run_id: str) -> list[StoredFile]:
    stem, _, ending = name.partition(".")
    names = {name, *(path.name for path in folder.glob(f"{stem}-*.{ending}"))}
    return [read_file(folder / each, run_id) for each in sorted(names)]


def read_timings(file: StoredFile) -> tuple[list[tuple[Timing, Line]], set[int]]:
    """Returns the timings that hold, with their lines, and the chunks that are named by lines that do not hold."""
    found: list[tuple[Timing, Line]] = []
    broken = set[tuple[Any, Any]]()
    for line in file.lines if file.is_ours else ():
        chunk, session = line.content.get("chunk"), line.content.get("session")
        timing = Timing.read(line.content) if line.holds else None
        if timing is not None:
            found.append((timing, line))
        elif isinstance(chunk, int) and isinstance(session, str):
            broken.add((chunk, session))
    return [(each, line) for each, line in found if each.key not in broken], {chunk for chunk, _ in broken}


def read_chunks(file: StoredFile) -> tuple[list[StoredChunk], set[int]]:
    """Returns the chunks whose lines all hold, and the numbers of those with a line that does not. A write without its
    closing line is neither.
    """
    chunks: list[StoredChunk] = []
    broken: set[int] = set()
    for lines in _sections(file.lines) if file.is_ours else ():
        is_closed, holds = "chunk_end" in lines[-1].content, all(line.holds for line in lines)
        chunk = _chunk(lines) if is_closed and holds else None
        if chunk is not None:
            chunks.append(chunk)
        elif is_closed or not holds:
            named = (line.content.get("chunk_end", line.content.get("chunk")) for line in lines)
            broken |= {number for number in named if isinstance(number, int)}
    return [each for each in chunks if each.number not in broken], broken


def _sections(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """Yields the lines up to each closing line; the last section may lack it."""
    section: list[Line] = []
    for line in lines:
        section.append(line)
        if "chunk_end" in line.content:
            yield section
            section = []
    if section:
        yield section


def _chunk(lines: Sequence[Line]) -> StoredChunk | None:
    *samples, closing = (line.content for line in lines)
    try:
        records = [record_from_json({k: v for k, v in each.items() if k != "chunk"}) for each in samples]
        if closing["records"] != len(records) or any(each["chunk"] != closing["chunk_end"] for each in samples):
            return None
        if not isinstance(closing["chunk_end"], int) or not isinstance(closing["session"], str):
            return None
        return StoredChunk(closing["chunk_end"], closing["session"], records, list(lines))
    except (KeyError, TypeError, UsageError):
        return None


@dataclass
class CellFiles:
    """What is stored of one cell: a config on a task."""

    folder: Path
    run_id: str
    part: str = ""  # of the process that writes, if several share the run
    records: dict[int, list[RequestRecord]] = field(default_factory=dict)  # by chunk
    timings: list[Timing] = field(default_factory=list)  # a chunk may have been timed more than once
    sessions: dict[int, str] = field(default_factory=dict)  # by chunk, the session that its samples come from
    damaged: list[Path] = field(default_factory=list)  # files that were set aside when the cell was opened
    faults: list[str] = field(default_factory=list)  # what does not hold, or is not from this run
    notes: list[str] = field(default_factory=list)  # what was done about it
    ends: dict[str, str] = field(default_factory=dict)  # by file, the checksum of its last line
    sizes: dict[str, int] = field(default_factory=dict)  # by file that is written to, its bytes
    provenance: Provenance | None = None  # from when the run began
    set_aside: Path | None = None  # where the results are that stood in its place

    def append_chunk(self, chunk: int, records: Sequence[RequestRecord], timing: Timing) -> None:
        """Stores a finished chunk: all of its samples or none. The timing goes first, so that no chunk lacks one."""
        self.append_timing(timing)
        closing = {"chunk_end": chunk, "records": len(records), "session": timing.session}
        self._append(SAMPLES, [*({"chunk": chunk, **record_to_json(record)} for record in records), closing])
        self.records[chunk] = list(records)
        self.sessions[chunk] = timing.session

    def append_timing(self, timing: Timing) -> None:
        """Stores a chunk's timing; alone if its samples are there, as for a baseline timed beside another config."""
        self._append(TRACE, [timing.as_json()])
        self.timings.append(timing)

    def _append(self, name: str, contents: Sequence[Mapping[str, Any]]) -> None:
        name = part_name(name, self.part)
        first = first_line(name, self.run_id)
        start = [] if name in self.ends else [first]
        content, end = seal([*start, *contents], first, self.ends.get(name, ""))
        size = self.sizes.get(name, 0)
        append_synced(self.folder / name, content, size=size)
        self.ends[name], self.sizes[name] = end, size + len(content)

    def write_summary(self, summary: Summary) -> None:
        """Writes the summary, with the last checksums of the files it was made from: lines cut off later are missed."""
        _write_document(self.folder / SUMMARY, summary.model_copy(update={"made_of": self.ends}))

    def write_scores(self, scores: Iterable[DocumentScore]) -> None:
        """Writes how right each document's answer is, replacing what was there before."""
        first = first_line(SCORES, self.run_id)
        content, end = seal([first, *(StoredScore(**asdict(each)).as_json() for each in scores)], first)
        write_beside(self.folder / SCORES, content)
        self.ends[SCORES] = end

    @property
    def all_records(self) -> list[RequestRecord]:
        return [record for chunk in sorted(self.records) for record in self.records[chunk]]

    @property
    def replacements(self) -> dict[tuple[int, str], Timing]:
        """Timings that replace others, by the chunk and session of those that they replace."""
        return {(each.chunk, each.instead_of): each for each in self.timings if each.instead_of}

    @property
    def repeated(self) -> set[tuple[int, int]]:
        """The chunks that were timed in a repeat, each with the repeat's number."""
        return {(each.chunk, each.repeat) for each in self.timings if each.repeat}

    @property
    def counting_timings(self) -> list[Timing]:
        """All timings but those that another one replaces."""
        repeated = self.replacements
        return [each for each in self.timings if each.key not in repeated]

    @property
    def own_timings(self) -> list[Timing]:
        """One timing per stored chunk: of the session that its samples come from, or the one that replaces it."""
        by_run, repeated = {each.key: each for each in self.timings}, self.replacements
        found = []
        for chunk in sorted(self.sessions):
            timing = by_run[chunk, self.sessions[chunk]]
            while timing.key in repeated:
                timing = repeated.pop(timing.key)
            found.append(timing)
        return found


def open_cell_files(
    folder: Path,
    identity: Identity,
    run_id: str,
    *,
    provenance: Provenance,
    force: bool = False,
    label: str = "",
    part: str = "",
) -> CellFiles:
    """Opens the cell for a run. Results of another run, or with `force` all, move to `previous/<config>-<run id>`.

    `label` names the run that opens it: only the first of its processes may set anything aside. `provenance` is kept
    from when the run begins.
    """
    stored = read_run(folder)
    is_ours = stored is not None and bool(label) and stored.opened_by == label
    if stored is not None and stored.run_id != run_id and is_ours:
        parts = ", ".join(differing_parts(stored.identity, identity))
        raise UsageError(f"the shards of one run differ in {parts}: {folder}")
    notes: list[str] = []
    aside: Path | None = None
    if (force and not is_ours) or (stored is not None and stored.run_id != run_id):
        aside = _set_folder_aside(folder, stored)
        parts = ", ".join(differing_parts(stored.identity, identity)) if stored else ""
        why = f"was of another run (differs in {parts})" if parts else "is run again"
        notes += [f"{folder} {why}: what was stored is set aside as {aside}"] if aside else []
        stored = None
    folder.mkdir(parents=True, exist_ok=True)
    if stored is None or not document_holds(stored.as_json()):
        if (folder / IDENTITY).exists():
            changed = _set_aside(folder / IDENTITY, DAMAGED)
            notes.append(f"{IDENTITY} was damaged or changed; it is set aside as {changed}")
        elif any((folder / name).exists() for name in (SAMPLES, TRACE)):
            notes.append(f"{IDENTITY} was missing in {folder}; what its files say decides whether they are used")
        stored = RunDocument(run_id=run_id, opened_by=label, provenance=provenance, identity=identity)
        _write_document(folder / IDENTITY, stored)
    cell = read_cell_files(folder, run_id, part=part, repair=True)
    cell.notes = notes + cell.notes
    cell.provenance, cell.set_aside = stored.provenance, aside
    return cell


def read_run(folder: Path) -> RunDocument | None:
    """Returns the content of `run.json`, whether or not it holds; None if it is not there or is something else."""
    return RunDocument.read(read_json(folder / IDENTITY))


def read_cell_files(folder: Path, run_id: str, *, part: str = "", repair: bool = False) -> CellFiles:
    """Reads what is stored of a run and holds. With `repair`, cuts off unfinished writes and sets aside what does not
    hold: a process that has a part in the files that it writes itself, since others may be writing theirs.
    """
    cell = CellFiles(folder, run_id, part)
    traces, samples = (_read_parts(folder, name, run_id) for name in (TRACE, SAMPLES))
    scores = read_file(folder / SCORES, run_id)
    timings, found = [read_timings(each) for each in traces], [read_chunks(each) for each in samples]
    cell.timings = [timing for held, _ in timings for timing, _ in held]
    timed = {each.key for each in cell.timings}
    untimed = set[int]()
    for chunks, _ in found:
        elsewhere = dict(cell.records)  # in the files of other processes: the same answers again are no fault
        for chunk in chunks:
            if (chunk.number, chunk.session) not in timed:
                untimed.add(chunk.number)
            elif elsewhere.get(chunk.number) != chunk.records:  # one that is stored twice: the audit says so
                cell.records[chunk.number] = cell.records.get(chunk.number, []) + chunk.records
                cell.sessions.setdefault(chunk.number, chunk.session)
    untimed -= cell.records.keys()
    of_summary = _summary_faults(folder, run_id, (*traces, *samples, scores))
    of_timings = [f"{TRACE} lacks the timing of chunk {_listed(untimed)}"] if untimed else []
    of_files = [fault for file in (*traces, *samples, scores) for fault in file.faults()]
    cell.faults = [*of_files, *of_timings, *of_summary]
    cell.ends = {file.path.name: last.sum for file in (*traces, *samples) if (last := _last_line(file)) and last.sum}
    if not repair:
        return cell
    for file, (held, broken) in zip(traces, timings, strict=True):
        if not part or file.path.name == part_name(TRACE, part):
            _repair_file(cell, file, [line.raw for _, line in held], broken)
    for file, (chunks, broken) in zip(samples, found, strict=True):
        if not part or file.path.name == part_name(SAMPLES, part):
            lines = [line.raw for each in chunks if (each.number, each.session) in timed for line in each.lines]
            _repair_file(cell, file, lines, broken | untimed)
    if scores.faults():
        aside = _set_aside(scores.path, DAMAGED)
        cell.damaged.append(aside)
        cell.notes.append(f"{scores.faults()[0]}: it is set aside as {aside}, and written again from the answers")
    _repair_summary(cell, of_summary)
    return cell


def _last_line(file: StoredFile) -> Line | None:
    return [file.head, *file.lines][-1] if file.is_ours else None


def _summary_faults(folder: Path, run_id: str, files: Sequence[StoredFile]) -> list[str]:
    content = read_json(folder / SUMMARY)
    if content is None:
        return [f"{SUMMARY} cannot be read"] if (folder / SUMMARY).exists() else []
    if content.get("run_id") != run_id:
        return [f"{SUMMARY} is of run {content.get('run_id')}"]
    if not document_holds(content):
        return [f"{SUMMARY} was changed"]
    made_of = content.get("made_of") or {}
    sums = {each.path.name: {line.sum for line in (each.head, *each.lines) if line and line.holds} for each in files}
    return [
        f"{name} lacks lines at its end that {SUMMARY} was made of"
        for name, last in made_of.items()
        if last not in sums.get(name, ())
    ]


def _repair_file(cell: CellFiles, file: StoredFile, kept: Sequence[bytes], again: set[int]) -> None:
    """Leaves only what holds in a file. Anything but the tail of an unfinished write is damage: a copy is kept."""
    path = file.path
    if not file.is_ours:
        aside = _set_aside(path, OTHER_RUN)
        cell.damaged.append(aside)
        cell.notes.append(f"{file.faults()[0]}: it is set aside as {aside}, and nothing of it is used")
        return
    content = path.read_bytes() if path.exists() else b""
    whole = b"".join([file.head.raw, *kept]) if file.head else b""
    if content != whole:
        if not _is_torn_tail(content, whole, file):
            aside = path.with_name(f"{path.name}.{DAMAGED}-{time.time_ns()}")
            write_beside(aside, content)
            cell.damaged.append(aside)
            why = [*file.faults(), "its chunks have no timing"][0]
            what = f"chunk {_listed(again)}" if again else "what it lacks"
            cell.notes.append(f"a damaged file was set aside as {aside}; {why}; {what} is run again")
            whole = reseal(whole)
        write_beside(path, whole)
    cell.ends.pop(path.name, None)
    if whole:
        cell.ends[path.name], cell.sizes[path.name] = last_sum(whole), len(whole)


def _is_torn_tail(content: bytes, whole: bytes, file: StoredFile) -> bool:
    """Whether only lines of an unfinished write are lost."""
    return content.startswith(whole) and not file.faults() and b'"chunk_end"' not in content[len(whole) :]


def _repair_summary(cell: CellFiles, its_faults: Sequence[str]) -> None:
    """Sets aside a summary that was not made from what is stored; the run writes another one at its end."""
    path = cell.folder / SUMMARY
    if path.exists() and (its_faults or cell.damaged):
        aside = _set_aside(path, DAMAGED)
        why = its_faults[0] if its_faults else f"it is not of what is left in {cell.folder}"
        cell.damaged.append(aside)
        cell.notes.append(f"{SUMMARY} is set aside as {aside}: {why}")


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _set_aside(path: Path, why: str) -> Path:
    """Gives a file a name that nothing reads, and returns it; nothing is deleted."""
    aside = path.with_name(f"{path.name}.{why}-{time.time_ns()}")
    try:
        return path.rename(aside)
    except OSError as error:
        raise cannot_write(path, error) from None


def _set_folder_aside(folder: Path, stored: RunDocument | None) -> Path | None:
    """Moves all that is stored to `previous/`, and returns where it is now; None if nothing is stored."""
    if stored is None and not any((folder / name).exists() for name in (SAMPLES, TRACE, SUMMARY)):
        return None
    target = folder.parent / "previous" / f"{folder.name}-{stored.run_id if stored else 'unknown'}"
    while target.exists():
        target = target.with_name(target.name + "-again")
    target.parent.mkdir(parents=True, exist_ok=True)
    return folder.rename(target)


def _write_document(path: Path, document: RunDocument | Summary) -> None:
    write_beside(path, json.dumps(seal_document(document.as_json()), indent=1) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_summary(path: Path) -> Summary | None:
    """Returns None if there is no summary, or if the file is something else."""
    return Summary.read(read_json(path))


def read_scores(folder: Path, run_id: str) -> dict[tuple[str, int], float]:
    """Returns, by task and document, how right the answer is; empty if that is not stored or does not hold."""
    file = read_file(folder / SCORES, run_id)
    scores = [StoredScore.read(line.content) for line in file.lines]
    if not file.is_ours or file.faults():
        return {}
    return {(each.task, each.document): each.value for each in scores if each is not None}
