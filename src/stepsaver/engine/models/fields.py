"""The kinds of values in a checkpoint's JSON files, each with its range: nothing is taken on trust.

A table of fields is the schema of a file. `null` counts as missing, as checkpoints use it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from stepsaver.engine.errors import UsageError, shown


class Field(Protocol):
    """What a value has to be: `means` says it in words, `holds` checks it."""

    @property
    def means(self) -> str: ...

    def holds(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class Whole:
    low: int
    high: int

    @property
    def means(self) -> str:
        return f"a whole number from {self.low} to {self.high}"

    def holds(self, value: Any) -> bool:
        return type(value) is int and self.low <= value <= self.high


@dataclass(frozen=True)
class Real:
    """A finite number above `low` and up to `high`."""

    low: float
    high: float

    @property
    def means(self) -> str:
        return f"a number above {self.low:g} and up to {self.high:g}"

    def holds(self, value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(min(value, self.high)) and self.low < value <= self.high


@dataclass(frozen=True)
class Flag:
    means: str = "true or false"

    def holds(self, value: Any) -> bool:
        return type(value) is bool


@dataclass(frozen=True)
class Word:
    means: str = "a text"

    def holds(self, value: Any) -> bool:
        return isinstance(value, str)


@dataclass(frozen=True)
class Entries:
    """An object. Its content has its own table."""

    means: str = "an object"

    def holds(self, value: Any) -> bool:
        return isinstance(value, dict)


@dataclass(frozen=True)
class OneOrMany:
    """A value, or a list of such values."""

    each: Field

    @property
    def means(self) -> str:
        return f"{self.each.means}, or a list of such"

    def holds(self, value: Any) -> bool:
        return all(map(self.each.holds, value)) if isinstance(value, list) else self.each.holds(value)


@dataclass(frozen=True)
class Many:
    each: Field

    @property
    def means(self) -> str:
        return f"a list, each entry {self.each.means}"

    def holds(self, value: Any) -> bool:
        return isinstance(value, list) and all(map(self.each.holds, value))


def read_fields(content: Mapping[str, Any], table: Mapping[str, Field]) -> dict[str, Any]:
    """The fields of the table that are present and not null, checked. Other fields are ignored."""
    found = {name: content[name] for name in table if content.get(name) is not None}
    for name, value in found.items():
        if not table[name].holds(value):
            raise UsageError(f"{name} {shown(value)} is not {table[name].means}")
    return found
