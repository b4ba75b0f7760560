"""Runs a program that a model wrote: in its own process, network and file namespaces, as nobody, within limits.

Where the machine does not allow that, it refuses. There is no weaker way to run such a program here. A program can
harm its own result only: it runs beside its tests, as the benchmark has it, and one that sets out to can fool them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from stepsaver.engine.errors import UsageError
from stepsaver.evaluation.sandbox_child import CANNOT_ISOLATE

CHILD = Path(__file__).with_name("sandbox_child.py")
GRACE_SECONDS = 30.0  # the sandbox ends a program in time by itself; this is for a machine that stands still
REPORT_BYTES = 1000


@dataclass(frozen=True)
class Limits:
    """Three seconds as in the benchmark's own harness. A program may not start processes or threads."""

    seconds: float = 3.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    processes: int = 1


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str  # "passed", or why not


class CannotIsolate(RuntimeError):
    """This machine does not allow the namespaces that the sandbox is made of."""


def require_sandbox(*, confirmed: bool, task: str) -> None:
    """Before anything is generated: the caller agreed to run model-written code, and this machine can contain it."""
    if not confirmed:
        raise UsageError(f"{task} runs code that the model wrote; confirm that with --confirm-run-unsafe-code")
    try:
        outcome = run_program("assert 1 + 1 == 2", Limits(seconds=10.0))
    except CannotIsolate as error:
        raise UsageError(
            f"{task} runs code that the model wrote, and this machine cannot contain it: {error}"
        ) from None
    if not outcome.passed:
        raise UsageError(f"{task} runs code that the model wrote, and the sandbox does not work: {outcome.reason}")


def run_program(source: str, limits: Limits | None = None) -> Outcome:
    """Passed if the program runs to its end, in time, without an exception or an exit."""
    limits = limits or Limits()
    interpreter = os.path.realpath(sys.executable)
    arguments = {"limits": asdict(limits), "interpreter": interpreter, "interpreter_folder": sys.base_prefix}
    process = subprocess.Popen(
        [interpreter, "-I", "-S", str(CHILD), json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )
    try:
        report, _ = process.communicate(source.encode("utf-8", "replace"), timeout=limits.seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"timed out after {limits.seconds:g} s")
    finally:
        _end(process)
    text = report[:REPORT_BYTES].decode("utf-8", "replace")
    if process.returncode == CANNOT_ISOLATE:
        raise CannotIsolate(text)
    return Outcome(text == "passed", text or f"ended without a result (status {process.returncode})")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the session; the kernel then ends every process of the namespace with its first one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
