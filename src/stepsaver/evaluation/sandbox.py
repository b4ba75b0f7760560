"""Judges a program that a model wrote: it runs behind walls, and its verdict is made where it cannot reach.

    run_program -> supervisor -> judge    runs the tests, and says whether they held
                              -> program  runs the program, and answers the judge's questions

Judge and program are two processes, each the only one in its own process, network, mount and queue namespaces, as
nobody, within limits. One socket connects them. The tests are in the judge: they call a function that sends its
arguments to the program and gets a value back. So a program

- cannot report. The way from the judge to the supervisor is a pipe that the program's process never had, and it can
  neither see nor signal nor trace the judge. All that it can do is to answer, in time.
- cannot read what is expected of it. The tests never enter its process.
- cannot answer with an object that equals all. Values cross the socket as plain data (`sandboxed/values.py`); any
  other object arrives as one that equals nothing. Arguments are copies: changing them does not reach the tests.
- cannot flood. The judge reads one answer per question, at most a megabyte of it; the supervisor a kilobyte of report.
- cannot stop the scoring. Only what fails before its first line runs is called a fault of the sandbox; whatever it does
  then, an exit status or a death by signal included, is its own failure.

A value that the tests accept is a right answer here as everywhere: a program that has the answers by heart passes.

Where the machine does not allow the walls, it refuses. There is no weaker way to run such a program here.
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
from stepsaver.evaluation.sandboxed.launch import command
from stepsaver.evaluation.sandboxed.supervisor import READY, STARTING_SECONDS

GRACE_SECONDS = 30.0  # the supervisor ends a program in time by itself; this is for a machine that stands still


@dataclass(frozen=True)
class Limits:
    """Three seconds as in the benchmark's own harness. A program may start threads, but no processes."""

    seconds: float = 3.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    threads: int = 256  # of all processes of one user: root's programs share nobody with what else runs as nobody


@dataclass(frozen=True)
class Outcome:
    passed: bool
    reason: str  # "passed", or why not


class CannotIsolate(UsageError):
    """This machine does not allow the namespaces that the sandbox is made of."""


def require_sandbox(*, confirmed: bool, task: str) -> None:
    """Before anything is generated: the caller agreed to run model-written code, and this machine can contain it."""
    if not confirmed:
        raise UsageError(f"{task} runs code that the model wrote; confirm that with --confirm-run-unsafe-code")
    tests = "def check(candidate):\n    assert candidate(21) == 42\n"
    try:
        outcome = run_program("def double(x): return 2 * x", tests, entry_point="double", limits=Limits(seconds=10.0))
    except CannotIsolate as error:
        raise UsageError(f"{task} runs code that the model wrote, and {error}") from None
    if not outcome.passed:
        raise UsageError(f"{task} runs code that the model wrote, and the sandbox does not work: {outcome.reason}")


def run_program(program: str, tests: str, *, entry_point: str, limits: Limits | None = None) -> Outcome:
    """Passed if `check(candidate)` of the tests returns, in time, with the program's `entry_point` as the candidate."""
    limits = limits or Limits()
    interpreter, folder = os.path.realpath(sys.executable), str(Path(__file__).resolve().parent)
    settings = {
        "limits": asdict(limits),
        "interpreter": interpreter,
        "interpreter_folder": os.path.realpath(sys.base_prefix),
        "folder": folder,
    }
    problem = json.dumps({"program": program, "tests": tests, "entry_point": entry_point})
    process = subprocess.Popen(
        command(interpreter, "supervisor", folder=folder, argument=json.dumps(settings)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )
    try:
        report, _ = process.communicate(problem.encode(), timeout=STARTING_SECONDS + limits.seconds + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(False, f"timed out after {limits.seconds:g} s")
    finally:
        _end(process)
    return _outcome(report, process.returncode)


def _outcome(report: bytes, status: int) -> Outcome:
    """After the mark that the program ran, everything is its own doing, also a supervisor that is no more."""
    if not report.startswith(READY):
        fault = json.loads(report)["cannot_isolate"] if report else f"its supervisor ended with status {status}"
        raise CannotIsolate(f"this machine cannot contain it: {fault}")
    verdict = json.loads(report.removeprefix(READY) or b"{}")
    return Outcome(verdict.get("passed") is True, verdict.get("reason", f"ended without a result (status {status})"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the session; the kernel then ends every process of the namespaces with their first ones."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
