"""Writes that tear nothing: an append that fails leaves the file as it was, and a file is replaced in one step."""

import os
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
