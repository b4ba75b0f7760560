"""Results on disk: one folder per config and task, samples appended chunk by chunk, a summary written at the end.

A chunk is its line in `trace.jsonl`, then its samples in one write and one sync, closed by a line of their own. What
stands behind the last such line is a torn tail and is cut off before the next write. Nothing is ever read from a run
with another id.
"""

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from stepsaver.bench.identity import differing_parts
from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestRecord, record_from_json, record_to_json

SAMPLES, TRACE, SUMMARY, IDENTITY = "samples.jsonl", "trace.jsonl", "summary.json", "run.json"

Timing = dict[str, Any]  # a line of `trace.jsonl`: what running one chunk once took


@dataclass
class Cell:
    """The stored part of one config on one task."""

    folder: Path
    run_id: str
    records: dict[int, list[RequestRecord]] = field(default_factory=dict)  # by chunk
    timings: list[Timing] = field(default_factory=list)  # a chunk may have been timed more than once
    sessions: dict[int, str] = field(default_factory=dict)  # by chunk, the session that its samples come from
    damaged: list[Path] = field(default_factory=list)  # files that were set aside when the cell was opened
    provenance: Mapping[str, Any] = field(default_factory=dict)  # of the run's beginning

    def append_chunk(self, chunk: int, records: Sequence[RequestRecord], timing: Mapping[str, Any]) -> None:
        """Stores a finished chunk: all of its samples or none. The timing goes first, so that none is without it."""
        self.append_timing(timing)
        lines = [json.dumps({"chunk": chunk, **record_to_json(record)}) for record in records]
        closing = {"chunk_end": chunk, "records": len(records), "session": timing["session"]}
        _append(self.folder / SAMPLES, "\n".join([*lines, json.dumps(closing)]) + "\n")
        self.records[chunk] = list(records)
        self.sessions[chunk] = timing["session"]

    def append_timing(self, timing: Mapping[str, Any]) -> None:
        """Stores what a chunk took; alone if its samples are there, as of a baseline timed beside another config."""
        _append(self.folder / TRACE, json.dumps(dict(timing)) + "\n")
        self.timings.append(dict(timing))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_beside(self.folder / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")

    @property
    def all_records(self) -> list[RequestRecord]:
        return [record for chunk in sorted(self.records) for record in self.records[chunk]]

    @property
    def own_timings(self) -> list[Timing]:
        """One timing per stored chunk: the one of the session that its samples come from."""
        by_run = {(each["chunk"], each["session"]): each for each in self.timings}
        return [by_run[chunk, self.sessions[chunk]] for chunk in sorted(self.sessions)]


def open_cell(
    folder: Path,
    identity: Mapping[str, Any],
    run_id: str,
    *,
    force: bool = False,
    label: str = "",
    provenance: Mapping[str, Any] | None = None,
) -> Cell:
    """The cell for a run. Results of another run, or all of them with `force`, move to `previous/<run id>`.

    `label` names the run that opens it: of its processes only the first may set anything aside. `provenance` is kept
    from the moment the run begins.
    """
    stored = read_json(folder / IDENTITY)
    is_ours = stored is not None and bool(label) and stored.get("opened_by") == label
    if stored is not None and stored.get("run_id") != run_id and is_ours:
        parts = ", ".join(differing_parts(stored["identity"], identity))
        raise UsageError(f"the shards of one run differ in {parts}: {folder}")
    if stored is not None and (stored.get("run_id") != run_id or (force and not is_ours)):
        _set_aside(folder, str(stored.get("run_id")))
        stored = None
    folder.mkdir(parents=True, exist_ok=True)
    if stored is None:
        stored = {"run_id": run_id, "opened_by": label, "provenance": provenance, "identity": identity}
        write_beside(folder / IDENTITY, json.dumps(stored, indent=1, default=str) + "\n")
    cell = read_cell(folder, run_id, repair=True)
    cell.provenance = stored.get("provenance") or {}
    return cell


class _StoredChunk(NamedTuple):
    number: int
    session: str
    records: list[RequestRecord]
    content: bytes


def read_cell(folder: Path, run_id: str, *, repair: bool = False) -> Cell:
    """What is stored of a run. With `repair`, torn tails are cut off and damaged files are set aside."""
    cell = Cell(folder, run_id)
    trace_lines = _whole_timings(_content(folder / TRACE))
    cell.timings = [json.loads(line) for line in trace_lines]
    timed = {(each["chunk"], each["session"]) for each in cell.timings}
    chunks = [each for each in _whole_chunks(_content(folder / SAMPLES)) if (each.number, each.session) in timed]
    for chunk in chunks:  # a chunk that stands there twice keeps both: the audit names it
        cell.records.setdefault(chunk.number, []).extend(chunk.records)
        cell.sessions.setdefault(chunk.number, chunk.session)
    if repair:
        _keep(folder / TRACE, b"".join(trace_lines), cell, unfinished_without=b"\n")
        _keep(folder / SAMPLES, b"".join(each.content for each in chunks), cell, unfinished_without=b'"chunk_end"')
    return cell


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _whole_timings(content: bytes) -> list[bytes]:
    """The lines before the first one that is torn or damaged."""
    lines = []
    for raw in content.splitlines(keepends=True):
        try:
            line = json.loads(raw)
            complete = raw.endswith(b"\n") and {"chunk", "session"} <= line.keys()
        except (ValueError, AttributeError):
            break
        if not complete:
            break
        lines.append(raw)
    return lines


def _whole_chunks(content: bytes) -> list[_StoredChunk]:
    """The chunks before the first line that is torn or damaged."""
    chunks: list[_StoredChunk] = []
    pending: list[RequestRecord] = []
    begin = end = 0
    for raw in content.splitlines(keepends=True):
        end += len(raw)
        try:
            line = json.loads(raw)
            if "chunk_end" in line:
                if line["records"] != len(pending) or not raw.endswith(b"\n"):
                    break
                chunks.append(_StoredChunk(line["chunk_end"], line["session"], pending, content[begin:end]))
                pending, begin = [], end
            else:
                line.pop("chunk")
                pending.append(record_from_json(line))
        except (ValueError, KeyError, TypeError, UsageError):
            break
    return chunks


def _keep(path: Path, whole: bytes, cell: Cell, *, unfinished_without: bytes) -> None:
    """Leaves only what is whole in a file. Anything but the tail of an unfinished write is damage: a copy stays."""
    content = _content(path)
    if content == whole:
        return
    is_torn_tail = content.startswith(whole) and unfinished_without not in content[len(whole) :]
    if not is_torn_tail:
        aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
        aside.write_bytes(content)
        cell.damaged.append(aside)
    write_beside(path, whole)


def _set_aside(folder: Path, run_id: str) -> None:
    target = folder.parent / "previous" / f"{folder.name}-{run_id}"
    while target.exists():
        target = target.with_name(target.name + "-again")
    target.parent.mkdir(parents=True, exist_ok=True)
    folder.rename(target)


def _append(path: Path, text: str) -> None:
    try:
        with path.open("ab") as stream:
            before = stream.tell()
            try:
                stream.write(text.encode())
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                os.ftruncate(stream.fileno(), before)
                raise
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; what was stored before is whole") from None


def write_beside(path: Path, content: str | bytes) -> None:
    """Replaces a file at once: whoever reads it finds the old content or the new."""
    beside = path.with_name(path.name + ".writing")
    try:
        with beside.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; what was stored before is whole") from None


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def exclusive(folder: Path, *, with_shards: bool = False) -> Iterator[None]:
    """One run at a time: a second one stops with a message. The shards of a run hold the lock together."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as stream:
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if with_shards else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            raise UsageError(f"another run is writing to {folder} (process {owner}); wait for it or stop it") from None
        stream.truncate(0)
        stream.write(f"{os.getpid()} on {platform.node()}")
        stream.flush()
        yield


@contextmanager
def merging(folder: Path) -> Iterator[None]:
    """One process at a time opens or fills what the shards of a run share; the others wait."""
    with (folder / ".merging").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
