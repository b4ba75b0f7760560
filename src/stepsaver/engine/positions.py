"""Sets of positions as bit masks: bit p is position p. Hashable, no tensor, and a subset test is one operation."""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Positions = int

NO_POSITIONS: Positions = 0


def positions_between(start: int, stop: int) -> Positions:
    """Positions start to stop - 1."""
    return (1 << stop) - (1 << start)


def position_set(positions: "NDArray[np.bool_]") -> Positions:
    """The set of positions where a boolean array is true."""
    return int.from_bytes(np.packbits(positions, bitorder="little").tobytes(), "little")


def position_sets(positions: "NDArray[np.bool_]") -> list[Positions]:
    """The same for each line of a boolean array."""
    packed, size = np.packbits(positions, axis=1, bitorder="little").tobytes(), -(-positions.shape[1] // 8)
    return [int.from_bytes(packed[start : start + size], "little") for start in range(0, len(packed), size)]


@lru_cache(maxsize=65536)
def position_list(positions: Positions) -> tuple[int, ...]:
    """The positions of a set in ascending order."""
    return tuple(position for position in range(positions.bit_length()) if positions >> position & 1)


@lru_cache(maxsize=65536)
def position_index(positions: Positions) -> "NDArray[np.int64]":
    """The positions of a set as an index array. Shared between callers, so read-only."""
    index = np.array(position_list(positions), dtype=np.int64)
    index.flags.writeable = False
    return index


@lru_cache(maxsize=65536)
def index_within(part: Positions, whole: Positions) -> "NDArray[np.int64]":
    """The indices of a part's positions among the positions of the whole. Shared between callers, so read-only."""
    index = np.searchsorted(position_index(whole), position_index(part))
    index.flags.writeable = False
    return index


def first_position(positions: Positions) -> int:
    """The lowest position of a set, which must not be empty."""
    assert positions, "an empty set has no first position"
    return (positions & -positions).bit_length() - 1


def is_subset(part: Positions, whole: Positions) -> bool:
    return part & ~whole == 0


def describe(positions: Positions) -> str:
    """The set as ranges: `8-15,20`."""
    ranges: list[str] = []
    while positions:
        start = first_position(positions)
        stop = start + first_position(~(positions >> start))
        ranges.append(str(start) if stop == start + 1 else f"{start}-{stop - 1}")
        positions &= ~positions_between(start, stop)
    return ",".join(ranges) or "none"


Predicts = Literal["next", "self", "both"]


class Prediction(NamedTuple):
    """Which token a position of a denoising step predicts. The architecture says which it is."""

    name: Predicts
    shift: int  # positions from a position to the one whose token it predicts

    @property
    def has_causal_context(self) -> bool:
        return self.name == "both"

    @property
    def of_context(self) -> "Prediction":
        """What positions of the context predict: of prefills and commits."""
        return NEXT if self.has_causal_context else self

    def readers(self, positions: Positions) -> Positions:
        """The positions whose logits predict the tokens of these positions."""
        return positions >> self.shift

    def predicted(self, positions: Positions) -> Positions:
        """The positions whose tokens these positions predict. The next block's first position is numbered after the
        block's last.
        """
        return positions << self.shift

    @property
    def opens_blocks(self) -> bool:
        """Whether the context before a block predicts its first token, so that no block starts with masks only."""
        return self.of_context.shift > 0


NEXT = Prediction("next", 1)
SELF = Prediction("self", 0)
BOTH = Prediction("both", 0)
PREDICTIONS: dict[Predicts, Prediction] = {each.name: each for each in (NEXT, SELF, BOTH)}
