"""Writes that tear nothing: an append that fails leaves the file as it was, and a file is replaced in one step."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepsaver.engine.errors import UsageError


def append_synced(path: Path, content: bytes) -> None:
    """Appends all of it or nothing. Unbuffered: closing the file would write what a buffer still holds."""
    try:
        with path.open("ab", buffering=0) as stream:
            before = stream.tell()
            try:
                write_all(stream.fileno(), content)
                os.fsync(stream.fileno())
            except BaseException:  # also a signal: half a chunk is no chunk
                os.ftruncate(stream.fileno(), before)
                raise
    except OSError as error:
        raise cannot_write(path, error) from None


def write_all(descriptor: int, content: bytes) -> None:
    """Writes everything: a single write may take only a part, such as when a disk is almost full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_beside(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: whoever reads it finds the old content or the new."""
    beside = path.with_name(path.name + ".writing")
    try:
        try:
            with beside.open("wb", buffering=0) as stream:
                write_all(stream.fileno(), content.encode() if isinstance(content, str) else content)
                os.fsync(stream.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise cannot_write(path, error) from None


def cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror}; what was stored before is whole")


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
