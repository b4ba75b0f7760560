"""Starts the judge and the program behind their walls, keeps the time, and passes on the judge's report.

It runs outside both. Its argument is JSON with the limits and the interpreter. Standard input, the problem, goes to the
judge unread. The output is JSON: what the machine does not allow, or, after a line that says that the program ran, the
verdict.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any

from stepsaver.evaluation.sandboxed.judge import READY
from stepsaver.evaluation.sandboxed.walls import WalledProcess, start_walled

STARTING_SECONDS = 60.0  # for two interpreters, on a busy machine
REPORT_BYTES = 1024


def start_both(settings: dict[str, Any], started: list[int]) -> int:
    """Starts both, and returns the descriptor of the judge's report. The program only has the socket to its judge."""
    to_program, to_judge = (end.detach() for end in socket.socketpair())
    report, judge_output = os.pipe()
    nowhere = os.open(os.devnull, os.O_RDWR)
    started.append(start_walled(WalledProcess("program", nowhere, nowhere, to_judge), settings))
    started.append(start_walled(WalledProcess("judge", 0, judge_output, to_program), settings))
    for descriptor in (0, judge_output, to_program, to_judge):
        os.close(descriptor)
    return report


def read_report(report: int, *, until: bytes, seconds: float) -> bytes | None:
    """What the judge says, up to a mark, the end, or a kilobyte. None if the time is over."""
    deadline = time.monotonic() + seconds
    said = b""
    while len(said) < REPORT_BYTES and not (until and said.endswith(until)):
        ready, _, _ = select.select([report], [], [], max(deadline - time.monotonic(), 0.0))
        if not ready:
            return None
        part = os.read(report, len(until) - len(said) if until else REPORT_BYTES - len(said))
        if not part:
            break
        said += part
    return said


def supervise(settings: dict[str, Any], started: list[int]) -> dict[str, Any]:
    try:
        report = start_both(settings, started)
    except OSError as error:
        return {"cannot_isolate": error.strerror or str(error)}
    # No line of the program runs until the judge is ready. Failures before that are the machine's fault, later never.
    if read_report(report, until=READY, seconds=STARTING_SECONDS) != READY:
        return {"cannot_isolate": f"no interpreter starts within its limits {settings['limits']}"}
    os.write(1, READY)
    seconds = settings["limits"]["seconds"]
    said = read_report(report, until=b"", seconds=seconds)
    if said is None:
        return {"passed": False, "reason": f"timed out after {seconds:g} s"}
    try:
        verdict: dict[str, Any] = json.loads(said)
        return verdict
    except ValueError:
        return {"passed": False, "reason": "failed: its judge ended without a verdict"}


def main(argument: str) -> None:
    settings = json.loads(argument) | {"user": os.geteuid(), "group": os.getegid()}
    started: list[int] = []
    outcome = supervise(settings, started)
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    for process in started:
        os.waitpid(process, 0)
    os.write(1, json.dumps(outcome).encode())
    os._exit(0)
