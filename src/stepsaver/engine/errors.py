"""Errors that a user can cause. Everything else is a bug and stays an assertion."""

import difflib
from collections.abc import Iterable

LONGEST_VALUE = 80  # characters of a value that a message quotes


class UsageError(ValueError):
    """Wrong input: one line that names the value and what is allowed. The command line prints it and exits with 2."""


def shown(value: object) -> str:
    """A value as a message quotes it: on one line, without control characters, and not too long."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of too many digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for an unknown name, with the nearest known names."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
    return UsageError(f"unknown {kind} {shown(name)}; nearest: {', '.join(near)}")
