"""Runs the program and answers its judge. Nothing here is trusted once the program has started."""

import os
import sys
import types
from collections.abc import Callable
from typing import Any

from stepsaver.evaluation.sandboxed.messages import Channel, Cut, decode, encode

QUESTION_BYTES = 1 << 30
TEXT_CHARACTERS = 300


def outcome_of(action: Callable[[], Any]) -> dict[str, Any]:
    """The result of an action. Anything that a program can raise is an answer too, even an exit."""
    try:
        return {"value": encode(action())}
    except BaseException as error:
        return {"raised": [type(error).__name__, _text(error)]}


def _text(error: BaseException) -> str:
    try:
        return str(error)[:TEXT_CHARACTERS]
    except BaseException:
        return ""


def answer(channel: Channel) -> None:
    channel.send("up")
    order = channel.receive(QUESTION_BYTES)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    names = module.__dict__
    channel.send(outcome_of(lambda: exec(compile(order["program"], "program", "exec"), names)))
    while True:
        question = channel.receive(QUESTION_BYTES)
        arguments, named = decode(question["arguments"]), decode(question["named"])
        channel.send(outcome_of(lambda: eval(order["entry_point"], names)(*arguments, **named)))  # noqa: B023


def main(channel: str) -> None:
    try:
        answer(Channel(int(channel)))
    except Cut:
        os._exit(0)
