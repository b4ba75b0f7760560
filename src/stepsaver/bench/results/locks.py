"""Who may write to a folder of results: one run at a time, or the shards of one run together."""

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepsaver.engine.errors import UsageError


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
