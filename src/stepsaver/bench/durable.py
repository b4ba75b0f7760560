"""Writes that tear nothing: an append that fails leaves the file as it was, and a file is replaced in one step."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepsaver.engine.errors import UsageError


def append_synced(path: Path, content: bytes, *, size: int) -> None:
    """Appends all of it or nothing to a file of `size` bytes, which is made if that is 0. A file that is gone, or of
    another size, was removed or written to by something else: nothing is added to it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | (0 if size else os.O_CREAT), 0o666)
        try:
            if os.fstat(descriptor).st_size != size:
                raise _not_ours(path)
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
            except BaseException:  # also a signal: half a chunk is no chunk
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        raise _not_ours(path) from None
    except OSError as error:
        raise cannot_write(path, error) from None


def _not_ours(path: Path) -> UsageError:
    return UsageError(f"{path} was removed or changed while this run wrote to it; run again to go on from what is left")


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
def exclusive(folder: Path, *, part: str = "") -> Iterator[None]:
    """One run at a time: a second one stops with a message. The processes that share a run, each with its `part`, hold
    the lock together, and each its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, ".lock", is_shared=bool(part)):
        if part:
            with _locked(folder, f".lock-{part}"):
                yield
        else:
            yield


@contextmanager
def _locked(folder: Path, name: str, *, is_shared: bool = False) -> Iterator[None]:
    with (folder / name).open("a+") as stream:
        try:
            fcntl.flock(stream, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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
    """One process at a time opens or sums up what the processes of a run share; the others wait."""
    with (folder / ".merging").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
