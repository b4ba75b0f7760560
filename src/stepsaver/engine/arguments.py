"""What the arguments of the public functions, of the command line and of an experiment's file may be: a table of kinds
and ranges. A value becomes Python's own here, once; anything else is refused in one line, before it fails deeper.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from stepsaver.engine.errors import UsageError, shown

MOST_BLOCK_ROWS = 4096  # known models have up to 64
MOST = 1 << 30  # of whatever is counted


class Kind(Protocol):
    @property
    def means(self) -> str: ...

    def read(self, value: object) -> Any:
        """The value as Python's own. Raises ValueError or OverflowError if it is of another kind or out of range."""
        ...


@dataclass(frozen=True)
class Whole:
    low: int
    high: int = MOST

    @property
    def means(self) -> str:
        return f"a whole number from {self.low} " + ("on" if self.high == MOST else f"to {self.high}")

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not self.low <= int(value) <= self.high:
            raise ValueError
        return int(value)


@dataclass(frozen=True)
class Number:
    """From `low` to `high`; `smallest` is the smallest above 0, if `low` is 0."""

    low: float
    high: float
    smallest: float = 0.0
    with_low: bool = True

    @property
    def means(self) -> str:
        low = f"from {self.low:g}" if self.with_low else f"above {self.low:g}"
        return f"a number {low} to {self.high:g}" + (f", or below {self.smallest:g} only 0" if self.smallest else "")

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ValueError
        number = float(value)
        is_low = number >= self.low if self.with_low else number > self.low
        if not (is_low and number <= self.high) or 0 < number < self.smallest:
            raise ValueError
        return number


@dataclass(frozen=True)
class Exactly:
    kind: type
    means: str

    def read(self, value: object) -> Any:
        if not isinstance(value, self.kind):
            raise ValueError
        return value


TRUTH, TEXT = Exactly(bool, "True or False"), Exactly(str, "a text")
TOKEN = Whole(0, 1 << 24)
BLOCK = Whole(1, MOST_BLOCK_ROWS)
# Arguments that are not listed here are checked where they are used.
ARGUMENTS: dict[str, Kind] = {
    "batch_size": Whole(1),
    "max_new_tokens": Whole(0),
    "limit": Whole(1),
    "n": Whole(1, 1000),
    "block_size": BLOCK,
    "sub_block_size": BLOCK,
    "mask_id": TOKEN,
    "stop_id": TOKEN,
    "seed": Whole(-(1 << 63), (1 << 63) - 1),
    "top_k": Whole(1),
    "threshold": Number(0, 1),
    "top_p": Number(0, 1, with_low=False),
    "temperature": Number(0, 1e100, smallest=1e-100),
    **dict.fromkeys(("chat", "ids", "details", "score_stop", "prefix_cache", "block_cache"), TRUTH),
    **dict.fromkeys(
        ("text", "task", "baseline", "revision", "device", "dtype", "weights", "compile", "join", "estimator"), TEXT
    ),
}


def converted(name: str, value: object) -> Any:
    """A value as Python's own: arrays and tensors of one number, numbers of libraries and fractions too."""
    kind = ARGUMENTS[name]
    try:
        return kind.read(_plain(value))
    except Exception:  # a value of somebody else's class may raise anything
        raise UsageError(f"{name} {shown(value)} is not {kind.means}") from None


def converted_all(*may_be_none: str, **given: object) -> Any:
    """All values by name. None stays None where it may be."""
    return {
        name: None if value is None and name in may_be_none else converted(name, value) for name, value in given.items()
    }


def option(name: str) -> Callable[[str], Any]:
    """What argparse makes of an option's text."""
    kind = ARGUMENTS[name]

    def read(text: str) -> Any:
        try:
            return kind.read(int(text) if isinstance(kind, Whole) else float(text))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not {kind.means}") from None

    return read


def _plain(value: object) -> object:
    """The number in an array or tensor without dimensions; numpy's own truths."""
    if getattr(value, "ndim", None) == 0 and callable(item := getattr(value, "item", None)):
        return item()
    return value
