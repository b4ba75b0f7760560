"""Results on disk: one folder per config and task, samples appended chunk by chunk, a summary written at the end.

A chunk is one write and one sync, closed by a line of its own; whatever stands behind the last such line is a torn tail
and is cut off before the next write. Nothing is ever read from a run with another id.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.records import RequestRecord, record_from_json, record_to_json

SAMPLES, TIMINGS, SUMMARY, IDENTITY = "samples.jsonl", "timings.jsonl", "summary.json", "run.json"


@dataclass
class Cell:
    """The stored part of one config on one task."""

    folder: Path
    run_id: str
    records: dict[int, list[RequestRecord]] = field(default_factory=dict)  # by chunk
    timings: list[dict[str, Any]] = field(default_factory=list)

    def append_chunk(self, chunk: int, records: Sequence[RequestRecord], timing: Mapping[str, Any]) -> None:
        """Stores a finished chunk and its timing: all of it or nothing."""
        lines = [json.dumps({"chunk": chunk, **record_to_json(record)}) for record in records]
        closing = {"chunk_end": chunk, "records": len(records), "timing": dict(timing)}
        _append(self.folder / SAMPLES, "\n".join([*lines, json.dumps(closing)]) + "\n")
        self.records[chunk] = list(records)
        self.timings.append(dict(timing))

    def append_timing(self, timing: Mapping[str, Any]) -> None:
        """Stores the timing of a chunk whose samples are there: a baseline timed again beside another config."""
        _append(self.folder / TIMINGS, json.dumps(dict(timing)) + "\n")
        self.timings.append(dict(timing))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_beside(self.folder / SUMMARY, json.dumps(summary, indent=1, default=str) + "\n")

    @property
    def all_records(self) -> list[RequestRecord]:
        return [record for chunk in sorted(self.records) for record in self.records[chunk]]


def open_cell(folder: Path, identity: Mapping[str, Any], run_id: str, *, force: bool = False) -> Cell:
    """The cell for a run. Results of another run, or all of them with `force`, move to `previous/<run id>`."""
    stored = read_json(folder / IDENTITY)
    if stored is not None and (force or stored.get("run_id") != run_id):
        _set_aside(folder, str(stored.get("run_id")))
        stored = None
    folder.mkdir(parents=True, exist_ok=True)
    if stored is None:
        write_beside(
            folder / IDENTITY, json.dumps({"run_id": run_id, "identity": identity}, indent=1, default=str) + "\n"
        )
    return read_cell(folder, run_id, repair=True)


def read_cell(folder: Path, run_id: str, *, repair: bool = False) -> Cell:
    """What is stored of a run. With `repair`, a torn tail is cut off and a damaged file is set aside."""
    cell = Cell(folder, run_id)
    path = folder / SAMPLES
    if path.exists():
        whole = _read_samples(path, cell)
        if repair and whole < path.stat().st_size:
            _keep_beginning(path, whole)
    if (folder / TIMINGS).exists():
        for line in (folder / TIMINGS).read_text(encoding="utf-8").splitlines():
            try:
                cell.timings.append(json.loads(line))
            except ValueError:
                break
    return cell


def _read_samples(path: Path, cell: Cell) -> int:
    """Fills the cell; returns how many bytes are whole chunks."""
    whole = position = 0
    pending: list[RequestRecord] = []
    with path.open("rb") as stream:
        for raw in stream:
            position += len(raw)
            try:
                line = json.loads(raw)
                if "chunk_end" in line:
                    if line["records"] != len(pending) or not raw.endswith(b"\n"):
                        break
                    cell.records[line["chunk_end"]] = pending
                    cell.timings.append(line["timing"])
                    pending, whole = [], position
                else:
                    line.pop("chunk")
                    pending.append(record_from_json(line))
            except (ValueError, KeyError, TypeError):
                break
    return whole


def _keep_beginning(path: Path, whole: int) -> None:
    """Cuts a torn tail; what was cut is kept beside, so that damage in the middle of a file can be looked at."""
    with path.open("rb+") as stream:
        stream.seek(whole)
        rest = stream.read()
        (path.parent / f"{path.name}.damaged-{int(time.time())}").write_bytes(rest)
        stream.truncate(whole)
        os.fsync(stream.fileno())


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


def write_beside(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".writing")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One runner at a time: a second one stops with a message."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            owner = stream.read().strip() or "unknown"
            raise UsageError(f"another run is writing to {folder} (process {owner}); wait for it or stop it") from None
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield
