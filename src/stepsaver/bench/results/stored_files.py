"""Reads `samples.jsonl` and `trace.jsonl`, and finds what in them can be trusted.

If a line does not hold, its whole chunk is dropped; the other chunks stay. A file from another run, or one that does
not name its run, is not used. Files in the former format have no checksums: they can be looked at, but no run goes on
from them.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from stepsaver.bench.results.chain import Line, first_line, read_lines
from stepsaver.bench.results.timing import Timing
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestRecord, record_from_json

Owner = Literal["ours", "other", "former"]

ALTERED = "was changed, put in or doubled, or the line before it was taken out"


class StoredFile(NamedTuple):
    path: Path
    owner: Owner
    lines: list[Line]  # without the first one
    head: Line | None  # the first one, which names the run
    tail: bytes  # of an unfinished write

    def trusts(self, line: Line) -> bool:
        return line.holds if self.owner == "ours" else bool(line.content)

    @property
    def sums(self) -> set[str | None]:
        return {line.sum for line in self.lines if line.holds}


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
        return StoredFile(path, "ours", [], None, tail)
    head = lines[0]
    if head.holds and head.content == first_line(path.name, run_id):
        return StoredFile(path, "ours", lines[1:], head, tail)
    is_former = head.sum is None and "format" not in head.content and bool(head.content)
    return StoredFile(path, "former" if is_former else "other", lines, None, tail)


def faults(file: StoredFile) -> list[str]:
    """What is wrong with a file: that it is not of this run, or the lines that do not hold."""
    if file.owner == "ours":
        return [f"{file.path.name} line {line.number} {ALTERED}" for line in file.lines if not line.holds]
    if file.owner == "former":
        return [f"{file.path.name} is of the former format: its lines have no checksums"]
    head = file.lines[0]
    if head.holds and head.content.get("file") == file.path.name:
        return [f"{file.path.name} is of run {head.content.get('run')}"]
    return [f"{file.path.name} does not say which run it is of"]


def read_timings(file: StoredFile) -> tuple[list[tuple[Timing, Line]], set[int]]:
    """Returns the timings that hold, with their lines, and the chunks that are named by lines that do not hold."""
    found: list[tuple[Timing, Line]] = []
    broken = set[tuple[Any, Any]]()
    for line in file.lines:
        chunk, session = line.content.get("chunk"), line.content.get("session")
        timing = Timing.read(line.content) if file.trusts(line) else None
        if timing is not None:
            found.append((timing, line))
        elif file.owner == "former":
            break
        elif isinstance(chunk, int) and isinstance(session, str):
            broken.add((chunk, session))
    timings = [(each, line) for each, line in found if each.key not in broken]
    return timings, {chunk for chunk, _ in broken}


def read_chunks(file: StoredFile) -> tuple[list[StoredChunk], set[int]]:
    """Returns the chunks whose lines all hold, and the numbers of those with a line that does not. A write without its
    closing line is neither.
    """
    chunks: list[StoredChunk] = []
    broken: set[int] = set()
    for lines in _sections(file.lines):
        is_closed, holds = "chunk_end" in lines[-1].content, all(map(file.trusts, lines))
        chunk = _chunk(lines) if is_closed and holds else None
        if chunk is not None:
            chunks.append(chunk)
        elif file.owner == "former":
            break
        elif is_closed or not holds:
            broken |= _numbers(lines)
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


def _numbers(lines: Sequence[Line]) -> set[int]:
    named = (line.content.get("chunk_end", line.content.get("chunk")) for line in lines)
    return {number for number in named if isinstance(number, int)}
