"""Errors that a user can cause. Everything else is a bug and stays an assertion."""

import difflib
from collections.abc import Iterable

LONGEST_MESSAGE, LONGEST_VALUE = 1000, 80  # characters of a message, and of a value that it quotes


class UsageError(ValueError):
    """Wrong input: one line that names the value and what is allowed. The command line prints it and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))  # what it quotes, a library's words or a file's, may have lines


def one_line(message: str) -> str:
    """Without lines, without control characters, and not too long."""
    line = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in " ".join(message.split()))
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}..."


def shown(value: object) -> str:
    """A value as a message quotes it: on one line, without control characters, and not too long."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of too many digits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # of somebody else's class
        text = f"an object of the class {type(value).__name__}"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown name, with the nearest known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
    return UsageError(f"unknown {kind} {shown(name)}; nearest: {', '.join(near)}")
