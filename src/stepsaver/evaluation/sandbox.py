"""Judges a program that a model wrote. It runs behind walls, and the verdict is made where it cannot reach.

    run_program -> supervisor -> judge    runs the tests, and says whether they passed
                              -> program  runs the program, and answers the judge's questions

Judge and program are two processes. Each is alone in its own process, network, mount and queue namespaces, runs as user
nobody, and has limits. One socket connects them. The tests are in the judge: they call a function that sends its
arguments to the program and gets a value back. So a program

- cannot report its own verdict. The judge reports through a pipe that the program's process never had, and the program
  cannot see, signal or trace the judge. All it can do is answer in time.
- cannot read what is expected of it. The tests never enter its process.
- cannot answer with an object that equals everything. Values cross the socket as plain data (`sandboxed/messages.py`);
  any other object arrives as one that equals nothing. Arguments are copies: changing them does not affect the tests.
- cannot flood. The judge reads one answer per question, at most a megabyte; the supervisor reads a kilobyte of report.
- cannot stop the scoring. Only a failure before the program's first line counts as a fault of the sandbox. Whatever the
  program does after that, including an exit status or a death by signal, is its own failure.

A value that the tests accept is a right answer, here as everywhere: a program that knows the answers by heart passes.

If the machine does not allow the walls, this refuses to run. There is no weaker way to run such a program here.
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
from stepsaver.evaluation.sandboxed import command
from stepsaver.evaluation.sandboxed.supervisor import READY, STARTING_SECONDS

GRACE_SECONDS = 30.0  # normally the supervisor ends a program in time; this is for a machine that stalls


@dataclass(frozen=True)
class Limits:
    """Three seconds, as in the benchmark's own harness. A program may start threads, but no processes."""

    seconds: float = 3.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20
    threads: int = 256  # over all processes of one user: run by root, programs share user nobody with other processes


@dataclass(frozen=True)
class ProgramResult:
    passed: bool
    reason: str  # "passed", or why not


class CannotIsolate(UsageError):
    """This machine does not allow the namespaces that the sandbox needs."""


def require_sandbox(*, confirmed: bool, task: str) -> None:
    """Before anything is generated: checks that the caller agreed to run model-written code, and tries the sandbox."""
    if not confirmed:
        raise UsageError(f"{task} runs code that the model wrote; confirm that with --confirm-run-unsafe-code")
    tests = "def check(candidate):\n    assert candidate(21) == 42\n"
    try:
        result = run_program("def double(x): return 2 * x", tests, entry_point="double", limits=Limits(seconds=10.0))
    except CannotIsolate as error:
        raise UsageError(f"{task} runs code that the model wrote, and {error}") from None
    if not result.passed:
        raise UsageError(f"{task} runs code that the model wrote, and the sandbox does not work: {result.reason}")


def run_program(program: str, tests: str, *, entry_point: str, limits: Limits | None = None) -> ProgramResult:
    """Passes if the tests' `check(candidate)` returns in time, with the program's `entry_point` as the candidate."""
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
        return ProgramResult(False, f"timed out after {limits.seconds:g} s")
    finally:
        _end(process)
    return _result(report, process.returncode)


def _result(report: bytes, status: int) -> ProgramResult:
    """The result by a report. After the mark that the program ran, any failure is its own, even a dead supervisor."""
    if not report.startswith(READY):
        fault = json.loads(report)["cannot_isolate"] if report else f"its supervisor ended with status {status}"
        raise CannotIsolate(f"this machine cannot contain it: {fault}")
    verdict = json.loads(report.removeprefix(READY) or b"{}")
    return ProgramResult(
        verdict.get("passed") is True, verdict.get("reason", f"ended without a result (status {status})")
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kills the session. With the first process of a namespace, the kernel ends all others in it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
