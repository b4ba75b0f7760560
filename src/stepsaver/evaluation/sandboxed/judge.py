"""Runs the tests. The program is in another process: the tests call a function that asks it, and only see values."""

import builtins
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from stepsaver.evaluation.sandboxed.messages import ANSWER_BYTES, Channel, Cut, decode, encode

READY = b"ready\n"  # the program's time starts here
REASON_CHARACTERS = 300


class Examinee:
    """The program's process. After one invalid answer it is not asked again, whatever the tests catch."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.fault: str | None = None

    def ask(self, question: Any) -> Any:
        try:
            if self.fault:
                raise Cut(self.fault)
            self._channel.send(question)
            return self._answer(self._channel.receive(ANSWER_BYTES))
        except Cut as cut:
            self.fault = str(cut)
            raise

    def _answer(self, message: Any) -> Any:
        try:
            if "raised" not in message:
                return decode(message["value"])
            name, text = (str(each) for each in message["raised"])
        except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError):
            raise Cut("its answer is no value") from None
        raise _error(name, text)


def _error(name: str, text: str) -> Exception:
    """The exception that the program raised, for tests that expect one. Never one that would end the judge."""
    kind = getattr(builtins, name, None) if name.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # some need more than a text
            pass
    return type(name if name.isidentifier() else "Exception", (Exception,), {})(text)


def candidate_of(examinee: Examinee) -> Callable[..., Any]:
    def candidate(*arguments: Any, **named: Any) -> Any:
        return examinee.ask({"arguments": encode(arguments), "named": encode(named)})

    return candidate


def judge(problem: dict[str, str], examinee: Examinee) -> str | None:
    """Why the program failed; None if the tests ran to the end and every question was answered."""
    try:
        examinee.ask({"program": problem["program"], "entry_point": problem["entry_point"]})
        candidate = candidate_of(examinee)
        tests: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(problem["tests"], "tests", "exec"), tests)
        tests[problem["entry_point"]] = candidate
        tests["check"](candidate)
    except Cut:
        pass
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return examinee.fault


def main(channel: str) -> None:
    """Reads the problem from standard input, and reports to the original standard output."""
    problem = json.loads(sys.stdin.buffer.read())
    report = os.dup(1)
    nowhere = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    to_program = Channel(int(channel))
    to_program.receive(ANSWER_BYTES)  # its interpreter is running
    os.write(report, READY)
    reason = judge(problem, Examinee(to_program))
    said = "passed" if reason is None else "failed: " + ascii(reason)[1:-1][:REASON_CHARACTERS]
    os.write(report, json.dumps({"passed": reason is None, "reason": said}).encode())
    os._exit(0)
