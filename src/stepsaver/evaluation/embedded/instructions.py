"""Whether a response obeys an instruction of mini_ifeval, checked by a program from the test file's line alone."""

from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]

ANIMALS = ("bird", "cat", "cow", "dog", "fish", "fox", "horse", "wolf")
FRUITS = ("apple", "cherry", "fig", "grape", "lemon", "melon", "peach", "plum")
COLORS = ("black", "blue", "brown", "gold", "green", "pink", "red", "white")
WORD_KINDS = {"animals": ANIMALS, "fruits": FRUITS, "colors": COLORS}


def obeys(kind: str, arguments: Arguments, response: str) -> bool:
    """Whether the response does what an instruction of this kind, with these arguments, asks for."""
    return CHECKS[kind](arguments, response.strip())


def _items(response: str) -> list[str]:
    return [item.strip() for item in response.split(",")]


def _check_repeat(arguments: Arguments, response: str) -> bool:
    closing = [arguments["closing"]] if arguments["closing"] else []
    return response.split() == [arguments["word"]] * arguments["times"] + closing


CHECKS: dict[str, Callable[[Arguments, str], bool]] = {
    "close": lambda a, response: _items(response) == [*a["words"], a["closing"]],
    "count": lambda a, response: _items(response) == [str(n) for n in range(a["start"], a["stop"] + 1)],
    "dashes": lambda a, response: [item.strip() for item in response.split("-")] == a["words"],
    "first": lambda a, response: _items(response) == a["words"][: a["count"]],
    "kind": lambda a, response: _items(response) == [word for word in a["words"] if word in WORD_KINDS[a["wanted"]]],
    "parity": lambda a, response: _items(response) == [str(n) for n in a["numbers"] if n % 2 == a["remainder"]],
    "repeat": _check_repeat,
    "reverse": lambda a, response: _items(response) == a["words"][::-1],
    "without": lambda a, response: _items(response) == [word for word in a["words"] if word != a["dropped"]],
}
