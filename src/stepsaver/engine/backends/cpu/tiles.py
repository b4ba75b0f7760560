"""A processor may announce matrix tiles (AMX) that do not work, as on some virtual machines.

oneDNN trusts the announcement, and the first multiplication in 16 bits ends the process with an illegal instruction.
The kernels' library asks the processor itself. Without that library, a forked process tries a multiplication first.
"""

import faulthandler
import os
import time
from functools import cache
from pathlib import Path

import torch

from stepsaver.engine.backends.cpu import library
from stepsaver.engine.errors import UsageError

CPU_FACTS = Path("/proc/cpuinfo")
HALVES = (torch.bfloat16, torch.float16)
LIMIT = "ONEDNN_MAX_CPU_ISA"  # oneDNN reads it only once, when it is first used
PATIENCE = 20.0  # seconds; the trial takes milliseconds
TRIAL_ROWS = 64  # enough for torch to use oneDNN instead of a plain loop


def are_announced() -> bool:
    try:
        return "amx_tile" in CPU_FACTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def require_working_tiles(dtype: torch.dtype, device: torch.device) -> None:
    """Before the first multiplication in a precision: stops oneDNN from using broken tiles, or refuses if too late."""
    if device.type == "cpu" and dtype in HALVES and not limit_to_what_works():
        raise UsageError(
            f"{str(dtype).removeprefix('torch.')} ends the process on this CPU, whose matrix tiles do not work; "
            f"start with {LIMIT}={library.WITHOUT_TILES} in the environment"
        )


@cache
def limit_to_what_works() -> bool:
    """Whether multiplications in 16 bits work here. If they do not, tells oneDNN not to use tiles and tries again."""
    if library.is_loaded() or not are_announced() or _survives_trial():
        return True
    os.environ.setdefault(LIMIT, library.WITHOUT_TILES)
    return _survives_trial()


def _survives_trial() -> bool:
    """Whether a forked process survives a multiplication. On one thread, because the others do not survive a fork."""
    process = os.fork()
    if process == 0:
        try:
            faulthandler.disable()  # no need to report how it dies
            torch.set_num_threads(1)
            for dtype in HALVES:
                ones = torch.ones(TRIAL_ROWS, TRIAL_ROWS, dtype=dtype)
                torch.nn.functional.linear(ones, ones)
        finally:
            os._exit(0)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return False
