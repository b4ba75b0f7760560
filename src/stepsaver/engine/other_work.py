"""Measures what else keeps the processor busy: timings on a machine that is not idle say little about the engine."""

import os
import time
from pathlib import Path
from typing import NamedTuple

PROCESSOR_TIMES = Path("/proc/stat")
FIELDS = 8  # fields of a core's line that are counted; the others are included in them already
IDLE_AND_WAITING = (3, 4)  # of these fields
BEFORE_SECONDS = 0.2
IDLE_CORES = 0.2  # less than this is the system's own work


class _Times(NamedTuple):
    """Seconds: of the clock, of our cores at work, and of this process with the children it waited for."""

    clock: float
    busy: float
    own: float


class OtherWork:
    """Counts from its creation. Time that the host of a virtual machine takes away counts as other work too."""

    def __init__(self) -> None:
        self._start = _now()

    def cores(self) -> float | None:
        """How many cores other processes kept busy on average; None if the system does not say."""
        now = _now()
        if self._start is None or now is None or now.clock <= self._start.clock:
            return None
        others = (now.busy - self._start.busy) - (now.own - self._start.own)
        return max(0.0, others / (now.clock - self._start.clock))


def other_cores_now(seconds: float = BEFORE_SECONDS) -> float | None:
    """How many cores other processes keep busy while this one sleeps for a moment."""
    work = OtherWork()
    time.sleep(seconds)
    return work.cores()


def not_idle(cores: float | None) -> str | None:
    """A warning for the user; None if the machine is idle or does not say."""
    if cores is None or cores < IDLE_CORES:
        return None
    return f"other processes keep {cores:.1f} of {len(own_cores())} cores busy: timings are slower and spread wider"


def own_cores() -> set[int]:
    """The cores that this process may run on. Work on the other cores of a shared machine does not matter."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _now() -> _Times | None:
    try:
        lines = [line.split() for line in PROCESSOR_TIMES.read_text(encoding="ascii").splitlines()]
        ours = {f"cpu{number}" for number in own_cores()}
        ticks = [[int(each) for each in fields[:FIELDS]] for name, *fields in lines if name in ours]
    except (OSError, ValueError):
        return None
    if not ticks or any(len(each) < FIELDS for each in ticks):
        return None
    busy = sum(sum(each) - sum(each[index] for index in IDLE_AND_WAITING) for each in ticks)
    own = os.times()
    return _Times(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(own[:4]))
