"""Chooses the number of threads for multiplication.

Threads wait for each other several times a layer, so all are as slow as the slowest. If another process has one of two
cores, two threads decode at less than half the speed of one (docs/speed.md).
"""

import os

import torch

from stepsaver.engine.errors import UsageError
from stepsaver.engine.other_work import other_cores_now

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
