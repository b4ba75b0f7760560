"""What a backend is given to run: index tensors over the packed rows of a forward, as `packing.py` makes them."""

from typing import NamedTuple

from torch import Tensor

from stepsaver.engine.models.rope import Rotation


class RowSubset(NamedTuple):
    """Some of a sequence of rows."""

    indices: Tensor | None  # None: all of them
    size: int
    deltas: Tensor | None = None  # where each row's delta is kept, for the rows of a sublayer


class SublayerRows(NamedTuple):
    """Of the rows that go on, which run a sublayer, and which take what it adds from the delta cache."""

    ran: RowSubset
    reused: RowSubset


class Mask:
    """What is added to the scores of several samples: 0 where a query sees a place, else minus infinity.

    [S, 1, 1 or R, at least L]: of all queries of a sample, or of each. GPUs read lines that begin at multiples of 8.
    """

    def __init__(self, added: Tensor, length: int) -> None:
        self.added, self.length = added, length
        self._folded: Tensor | None = None

    def of_queries(self) -> Tensor:
        return self.added[..., : self.length]

    def folded(self, kv_heads: int, sharing: int, rows: int) -> Tensor:
        """[S, K, sharing * R, L], for query heads that are folded into rows: made once for all layers."""
        if self._folded is None:
            is_even = self.added.shape[2] == 1
            lines = self.added if is_even or sharing == 1 else self.added.repeat(1, 1, sharing, 1)
            self._folded = lines[..., : self.length].expand(-1, kv_heads, sharing * rows, -1)
        return self._folded


class Alone(NamedTuple):
    """Queries of one sample that are attended in a call of their own."""

    queries: slice
    slot: int
    length: int
    mask: Mask | None  # None: all see everything


class PaddedGroup(NamedTuple):
    """Samples that are attended in one call, their queries padded to as many each, their keys to `length`."""

    chosen: Tensor | None  # of the packed queries, sample by sample; None: all, in order
    slots: Tensor | slice  # a slice: a view of the cache, slots between the samples idle
    samples: int
    length: int
    mask: Mask


class Attending(NamedTuple):
    """How queries attend. A query sees the first places of its slot but those of a gap. Whatever a backend attends by
    itself is in `segments`: of each, the first of its rows, the one after its last, and its slot.
    """

    segments: Tensor | None  # [segments, 3]
    views: Tensor | None  # [N, 3], of all queries if there are segments: how many places it sees, and the gap
    alone: tuple[Alone, ...]
    grouped: tuple[PaddedGroup, ...]
    rows: Tensor | None = None  # the queries that are in no segment; None: all
    taken: Tensor | None = None  # where each of these is in what comes out, alone and then in groups; None: in order


class AttentionRows(NamedTuple):
    """Rows of which a projection gives the queries, the keys and values, or both, and what becomes of these."""

    rows: RowSubset
    rotation: Rotation
    places: Tensor | None  # [N, 2]: slot and position of their keys and values; None: queries only
    attending: Attending | None  # None: keys and values only


class PackedRun(NamedTuple):
    """What consecutive layers that run the same rows share."""

    projected: tuple[AttentionRows, ...]  # one for all; or those that write keys and values, then those that attend
    kept: Tensor | None  # the rows that go on after the keys and values; None: all
    attention: SublayerRows
    mlp: SublayerRows
    is_whole: bool  # every row writes its keys and values, and every row that goes on runs every sublayer

    @property
    def written(self) -> AttentionRows | None:
        """The rows that write keys and values."""
        return next((each for each in self.projected if each.places is not None), None)

    @property
    def attended(self) -> AttentionRows | None:
        """The rows that attend."""
        return next((each for each in self.projected if each.attending is not None), None)
