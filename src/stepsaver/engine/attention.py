"""How the queries of a forward attend: every row sees the first rows of its sample, as many as its step says.

Inside a block nothing is masked, so one sample needs no mask at all: its queries meet exactly the rows it may see, as a
view of the cache. A backend may attend samples as they are, up to a length of context, and causal rows as well. The
others are attended by torch's fused kernel, several samples in one call, their queries and contexts padded.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from stepsaver.engine.backends.packed import Alone, Attending, PaddedGroup
from stepsaver.engine.cache import Index, KeyValueCache

FEW_ROWS = 16  # samples of no more rows are padded together, and those of more


class Segment(NamedTuple):
    """One step's part of the packed queries: rows start to stop - 1, and how much of its slot each of them sees."""

    start: int
    stop: int
    slot: int
    first: int  # rows that the first query sees
    length: int  # rows that the last one sees, which are the most
    growth: int | None  # how many more each sees than the one before it; None: it differs
    lengths: Index | None = None  # of each query, if they differ

    @property
    def rows(self) -> int:
        return self.stop - self.start


def plan_attending(segments: Sequence[Segment], cache: KeyValueCache) -> Attending:
    """The backend attends the samples that it is made for; the others are attended together if all their queries see
    the same rows and their contexts differ by less than a factor of four.
    """
    own: list[tuple[int, ...]] = []
    alone: list[Segment] = []
    groups: dict[tuple[int, bool, int], list[Segment]] = {}
    turns: dict[int, int] = {}  # a sample with several steps has one in each of several groups
    for each in segments:
        assert each.length <= cache.capacity
        if cache.backend.attends(cache.head_dim, each.length):
            own += _pieces(each)
        elif each.growth == 0:
            turn = turns[each.slot] = turns.get(each.slot, 0) + 1
            groups.setdefault((turn, each.rows > FEW_ROWS, each.length.bit_length() // 2), []).append(each)
        else:
            alone.append(each)
    alone += [group[0] for group in groups.values() if len(group) == 1]
    return Attending(
        torch.tensor(own) if own else None,
        tuple(_alone(each, cache.device) for each in alone),
        tuple(_padded_group(group, cache) for group in groups.values() if len(group) > 1),
    )


def _pieces(segment: Segment) -> Iterator[tuple[int, ...]]:
    """A segment as `Attending` describes it: in pieces whose rows see equally many rows, if they differ irregularly."""
    if segment.growth is not None:
        yield segment.start, segment.stop, segment.slot, segment.first, segment.growth
        return
    assert segment.lengths is not None
    starts = [0, *(np.flatnonzero(np.diff(segment.lengths)) + 1).tolist(), segment.rows]
    for start, stop in pairwise(starts):
        yield segment.start + start, segment.start + stop, segment.slot, int(segment.lengths[start]), 0


def _alone(segment: Segment, device: torch.device) -> Alone:
    mask = None
    if segment.lengths is not None:
        seen = np.arange(segment.length) < segment.lengths[:, None]
        mask = torch.from_numpy(seen).to(device, non_blocking=True)
    return Alone(slice(segment.start, segment.stop), segment.slot, segment.length, mask)


def _padded_group(group: list[Segment], cache: KeyValueCache) -> PaddedGroup:
    device = cache.device
    rows = max(segment.rows for segment in group)
    length = max(segment.length for segment in group)
    slots = np.array([segment.slot for segment in group])
    # a view of all slots up to the last costs no copy, and is worth it while three of four are in use
    is_view = 4 * len(slots) > 3 * slots.max()
    order = slots if is_view else np.arange(len(slots))
    count = int(order.max()) + 1
    lengths = np.ones((count, 1, 1, 1), dtype=np.int64)
    lengths[order, 0, 0, 0] = [segment.length for segment in group]
    mask = torch.from_numpy(np.where(np.arange(length) < lengths, 0.0, -np.inf)).to(cache.stored.dtype)
    packed = np.concatenate([np.arange(segment.start, segment.stop) for segment in group])
    padded = np.concatenate([index * rows + np.arange(each.rows) for index, each in zip(order, group, strict=True)])
    is_dense = len(padded) == count * rows and (np.diff(padded) == 1).all()
    return PaddedGroup(
        packed_rows=torch.from_numpy(packed).to(device, non_blocking=True),
        padded_rows=None if is_dense else torch.from_numpy(padded).to(device, non_blocking=True),
        slots=slice(0, count) if is_view else torch.from_numpy(slots).to(device, non_blocking=True),
        samples=count,
        rows=rows,
        length=length,
        mask=mask.to(device, non_blocking=True),
    )
