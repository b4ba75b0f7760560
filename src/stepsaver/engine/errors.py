"""What a user can get wrong. Everything else is a bug and stays an assertion."""

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Wrong input: one line that names the value and what is allowed. The command line prints it and exits with 2."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that no registry has, with the nearest ones it does have."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
    return UsageError(f"unknown {kind} {name!r}; nearest: {', '.join(near)}")
