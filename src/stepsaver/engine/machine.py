"""Where a model runs: device, precision, threads, and what else keeps the processor busy."""

import os
import platform
import time
from pathlib import Path
from typing import NamedTuple

import torch

from stepsaver.engine.errors import UsageError, shown


def choose_device(name: str) -> torch.device:
    """`auto`: the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {shown(name)} is unknown; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; allowed: auto, cpu, cuda, cuda:N")
    if (device.index or 0) >= (torch.cuda.device_count() if device.type == "cuda" else 1):
        raise UsageError(f"device {name!r} is not available on this machine")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA from compute capability 8.0, float16 on older CUDA, float32 elsewhere."""
    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in known:
            raise UsageError(f"dtype {shown(name)} is unknown; allowed: auto, {', '.join(known)}")
        if name == "bfloat16" and not _has_bfloat16(device):
            raise UsageError(f"{device_name(device)} has no bfloat16 (compute capability 8.0): use float16")
        return known[name]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if _has_bfloat16(device) else torch.float16


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


CPU_FACTS = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_FACTS.read_text(encoding="utf-8").splitlines() if CPU_FACTS.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


# Threads wait for each other several times a layer, so all are as slow as the slowest. If other work has one of two
# cores, two threads decode at less than half the speed of one.
CHOSEN_BY_USER = "OMP_NUM_THREADS"
_computing: int | None = None  # the process that computes; its threads do not survive a fork


def leave_cores_to_others(device: torch.device) -> None:
    """On a CPU, uses as many threads as there are cores that are free now, unless the user has chosen a number."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads > 1 and CHOSEN_BY_USER not in os.environ:
        torch.set_num_threads(max(1, threads - round(other_cores_now() or 0.0)))


def require_own_threads() -> None:
    """Refuses to compute in a process forked from one that has computed: its threads are not there."""
    global _computing
    _computing = _computing or os.getpid()
    if _computing != os.getpid():
        raise UsageError(
            "this process was forked from one that had loaded a model, and threads do not survive a fork: load models "
            "after the fork only, or start processes with multiprocessing's method `spawn`"
        )


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
