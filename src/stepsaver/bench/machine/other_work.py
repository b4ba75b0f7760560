"""What else keeps the processor busy: timings on a machine that is not idle say little about the engine."""

import os
import time
from pathlib import Path
from typing import NamedTuple

PROCESSOR_TIMES = Path("/proc/stat")
IDLE_AND_WAITING = (3, 4)  # of the fields of its first line, among the first eight; those after them are counted twice
FIELDS = 8
BEFORE_SECONDS = 0.2
IDLE_CORES = 0.2  # below this is what a system does for itself


class _Times(NamedTuple):
    """Seconds: on the clock, of all cores at work, and of this process with the children that it waited for."""

    clock: float
    busy: float
    own: float


class OtherWork:
    """Counts from where it was made. Time that the host of a virtual machine takes away is others' work as well."""

    def __init__(self) -> None:
        self._start = _now()

    def cores(self) -> float | None:
        """How many cores others kept busy on average; None where the system does not say."""
        now = _now()
        if self._start is None or now is None or now.clock <= self._start.clock:
            return None
        others = (now.busy - self._start.busy) - (now.own - self._start.own)
        return max(0.0, others / (now.clock - self._start.clock))


def other_cores_now(seconds: float = BEFORE_SECONDS) -> float | None:
    """How many cores others keep busy while this process waits for a moment."""
    work = OtherWork()
    time.sleep(seconds)
    return work.cores()


def not_idle(cores: float | None) -> str | None:
    """What to say about it; None for a machine that is idle, or does not say."""
    if cores is None or cores < IDLE_CORES:
        return None
    return f"other processes keep {cores:.1f} of {os.cpu_count()} cores busy: timings are slower and spread wider"


def _now() -> _Times | None:
    try:
        first = PROCESSOR_TIMES.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(each) for each in first[1 : FIELDS + 1]]
    except (OSError, ValueError):
        return None
    if len(ticks) < FIELDS:
        return None
    busy = sum(ticks) - sum(ticks[index] for index in IDLE_AND_WAITING)
    own = os.times()
    return _Times(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(own[:4]))
