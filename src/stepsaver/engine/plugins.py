"""What other packages add: rules, policies, architectures and tasks, declared as entry points.

    [project.entry-points."stepsaver.rules"]
    every_other = "my_package:EveryOther"

Users refer to an entry by its name. It is loaded when somebody asks for it, so a broken plug-in only harms those who
use it.
"""

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from stepsaver.engine.errors import UsageError

LONGEST_LINE = 200  # characters of an error of others


def plugin_names(group: str) -> frozenset[str]:
    return frozenset(_entries(group))


def load_plugin(group: str, name: str, *, own: Iterable[str] = ()) -> Any:
    """The object of an entry; None if no package declares it. Refuses a name that is declared twice or is in `own`."""
    found = _entries(group).get(name, ())
    if not found:
        return None
    if len(found) > 1 or name in own:
        owners = [*(["stepsaver"] if name in own else []), *map(_owner, found)]
        raise UsageError(f"{group}: {name} is declared by {' and by '.join(owners)}; one of them has to go")
    try:
        return found[0].load()
    except Exception as error:  # code of others, which may fail in any way
        line = " ".join(str(error).split())[:LONGEST_LINE]
        raise UsageError(
            f"{group}: {name} of {_owner(found[0])} cannot be loaded: {type(error).__name__}: {line}"
        ) from None


def plugin_problem(group: str, name: str, what: str) -> UsageError:
    """The error for an entry whose object is of the wrong kind."""
    return UsageError(f"{group}: {name} of {_owner(_entries(group)[name][0])} is not {what}")


def raise_fault(kind: str, made: object, error: Exception) -> NoReturn:
    """Says in one line, with its name, what code of others did wrong. An error in our own code stays what it is."""
    module = type(made).__module__
    if module.startswith("stepsaver."):
        raise error
    name, line = getattr(made, "name", type(made).__name__), " ".join(str(error).split())[:LONGEST_LINE]
    raise UsageError(f"{kind} {name} of {module} fails: {type(error).__name__}: {line}") from error


@cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """The entries of a group by name. An entry that is found on two paths counts once."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, {})[entry.value] = entry
    return {name: tuple(entries.values()) for name, entries in found.items()}


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name if entry.dist else 'a package'} ({entry.value})"
