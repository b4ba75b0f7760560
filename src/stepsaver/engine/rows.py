"""Sets of rows as bit masks: bit r is row r. Hashable, needs no tensor, and a subset test is one operation."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Rows = int

NO_ROWS: Rows = 0


def rows_between(start: int, stop: int) -> Rows:
    """Rows start to stop - 1."""
    return (1 << stop) - (1 << start)


def row_set(rows: "NDArray[np.bool_]") -> Rows:
    """The set of rows where a boolean array is true."""
    return int.from_bytes(np.packbits(rows, bitorder="little").tobytes(), "little")


def row_sets(rows: "NDArray[np.bool_]") -> list[Rows]:
    """The same for each line of a boolean array."""
    packed, size = np.packbits(rows, axis=1, bitorder="little").tobytes(), -(-rows.shape[1] // 8)
    return [int.from_bytes(packed[start : start + size], "little") for start in range(0, len(packed), size)]


@lru_cache(maxsize=65536)
def row_list(rows: Rows) -> tuple[int, ...]:
    """The rows of a set in ascending order."""
    return tuple(row for row in range(rows.bit_length()) if rows >> row & 1)


@lru_cache(maxsize=65536)
def row_index(rows: Rows) -> "NDArray[np.int64]":
    """The rows of a set as an index array. Shared between callers, so read-only."""
    index = np.array(row_list(rows), dtype=np.int64)
    index.flags.writeable = False
    return index


@lru_cache(maxsize=65536)
def index_within(part: Rows, whole: Rows) -> "NDArray[np.int64]":
    """The indices of a part's rows among the rows of the whole. Shared between callers, so read-only."""
    index = np.searchsorted(row_index(whole), row_index(part))
    index.flags.writeable = False
    return index


def first_row(rows: Rows) -> int:
    """The lowest row of a set, which must not be empty."""
    assert rows, "an empty set has no first row"
    return (rows & -rows).bit_length() - 1


def is_subset(part: Rows, whole: Rows) -> bool:
    return part & ~whole == 0


def describe(rows: Rows) -> str:
    """The set as ranges: `8-15,20`."""
    ranges: list[str] = []
    while rows:
        start = first_row(rows)
        stop = start + first_row(~(rows >> start))
        ranges.append(str(start) if stop == start + 1 else f"{start}-{stop - 1}")
        rows &= ~rows_between(start, stop)
    return ",".join(ranges) or "none"
