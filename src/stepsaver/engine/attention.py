"""How the queries of a forward attend: each sees the first places of its slot, as many as its step says, but for a gap.

Inside a block nothing is masked, so one sample needs no mask at all: its queries meet exactly the places that they may
see, as a view of the cache. A backend may attend samples as they are, up to a length of context. The others are
attended by torch's fused kernel, several samples in one call, their queries and contexts padded.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepsaver.engine.backends.backend import Upload
from stepsaver.engine.backends.packed import Alone, Attending, Mask, PaddedGroup
from stepsaver.engine.cache import Index, KeyValueCache

LINE = 8  # GPUs read masks whose lines begin at multiples of so many numbers; others they copy in every layer
BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
FEW_ROWS = 16  # samples of no more queries are padded together, and those of more
MASKED_ROWS = 64  # samples whose queries see different places are padded with others up to so many queries


class Segment(NamedTuple):
    """One step's part of the packed queries, start to stop - 1, and what each of them sees."""

    start: int
    stop: int
    slot: int
    views: Index  # [queries, 3]: so many first places of the slot, but not those of a gap; one line if it is the same

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def is_even(self) -> bool:
        """Whether all queries see the same places, without a gap."""
        return len(self.views) == 1 and not self.views[0, 2]

    @property
    def seen(self) -> int:
        """The places that the queries see together."""
        return int(self.views[0, 0] if len(self.views) == 1 else self.views[:, 0].max())


def plan_attending(segments: Sequence[Segment], cache: KeyValueCache, upload: Upload) -> Attending:
    """The backend attends the samples that it is made for. The others are attended together if their contexts differ by
    less than a factor of four, and their queries all see the same places or are few.
    """
    own: list[Segment] = []
    alone: list[Segment] = []
    groups: dict[tuple[int, bool, bool, int], list[Segment]] = {}
    turns: dict[int, int] = {}  # a sample with several steps has one in each of several groups
    for each in segments:
        seen = each.seen
        assert seen <= cache.capacity
        if cache.backend.attends(cache.head_dim, seen):
            own.append(each)
        elif each.is_even or each.rows <= MASKED_ROWS:
            turn = turns[each.slot] = turns.get(each.slot, 0) + 1
            alike = turn, each.is_even, each.rows > FEW_ROWS, seen.bit_length() // 2
            groups.setdefault(alike, []).append(each)
        else:
            alone.append(each)
    described = torch.tensor([each[:3] for each in own]) if own else None
    if len(own) == len(segments):
        return Attending(described, _views(segments) if own else None, (), (), None, None)
    alone += [group[0] for group in groups.values() if len(group) == 1]
    alone.sort()
    together = [_padded_group(group, segments[-1].stop, cache, upload) for group in groups.values() if len(group) > 1]
    rows, taken = _order(alone, [rows for _, rows in together], upload, is_all=not own)
    return Attending(
        described,
        _views(segments) if own else None,
        tuple(_alone(each, cache, upload) for each in alone),
        tuple(group for group, _ in together),
        rows,
        taken,
    )


class _PartRows(NamedTuple):
    """Of the queries of a part: which of the packed ones they are, and which of its padded ones, of so many."""

    packed: Index
    padded: Index
    padded_count: int


def _order(
    alone: list[Segment], groups: list[_PartRows], upload: Upload, *, is_all: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Which packed queries are attended here, if not all are, and where each is in what comes out."""
    if not alone and not groups:
        return None, None
    parts = [_PartRows(np.arange(each.start, each.stop), np.arange(each.rows), each.rows) for each in alone] + groups
    starts = np.cumsum([0, *(part.padded_count for part in parts)])
    packed = np.concatenate([part.packed for part in parts])
    taken = np.concatenate([start + part.padded for start, part in zip(starts, parts, strict=False)])
    order = np.argsort(packed)
    is_in_order = len(taken) == starts[-1] and (np.diff(taken[order]) == 1).all()
    return None if is_all else upload.tensor(packed[order]), None if is_in_order else upload.tensor(taken[order])


def _views(segments: Sequence[Segment]) -> Tensor:
    counts = [count for each in segments for count in ([each.rows] if len(each.views) == 1 else [1] * each.rows)]
    return torch.from_numpy(np.concatenate([each.views for each in segments]).repeat(counts, axis=0))


def _of_each(segment: Segment) -> Index:
    return np.broadcast_to(segment.views, (segment.rows, 3))


def _alone(segment: Segment, cache: KeyValueCache, upload: Upload) -> Alone:
    seen = segment.seen
    mask = None if segment.is_even else _mask([segment], np.zeros(1, dtype=np.int64), cache.stored.dtype, upload)
    return Alone(slice(segment.start, segment.stop), segment.slot, seen, mask)


def _padded_group(
    group: list[Segment], queries: int, cache: KeyValueCache, upload: Upload
) -> tuple[PaddedGroup, _PartRows]:
    rows = max(segment.rows for segment in group)
    length = max(segment.seen for segment in group)
    slots = np.array([segment.slot for segment in group])
    # a view of all slots up to the last costs no copy, and is worth it while three of four are in use
    is_view = 4 * len(slots) > 3 * slots.max()
    order = slots if is_view else np.arange(len(slots))
    count = int(order.max()) + 1
    packed = np.concatenate([np.arange(segment.start, segment.stop) for segment in group])
    padded = np.concatenate([index * rows + np.arange(each.rows) for index, each in zip(order, group, strict=True)])
    chosen = np.zeros(count * rows, dtype=np.int64)  # what pads the group is any query
    chosen[padded] = packed
    is_in_order = len(chosen) == queries and (np.diff(chosen) == 1).all()
    padded_group = PaddedGroup(
        chosen=None if is_in_order else upload.tensor(chosen),
        slots=slice(0, count) if is_view else upload.tensor(slots),
        samples=count,
        length=length,
        mask=_mask(group, order, cache.stored.dtype, upload),
    )
    return padded_group, _PartRows(packed, padded, len(chosen))


def _mask(group: list[Segment], order: Index, dtype: torch.dtype, upload: Upload) -> Mask:
    """Which places the queries of a group see. What pads the group sees one place."""
    length = max(segment.seen for segment in group)
    rows = 1 if group[0].is_even else max(segment.rows for segment in group)
    added, there = upload.empty((int(order.max()) + 1, 1, rows, -(-length // LINE) * LINE), dtype)
    lines = added.fill_(-torch.inf).view(BITS[dtype]).numpy()  # of the same bits: numpy lacks bfloat16
    hidden = lines[0, 0, 0, 0]
    lines[..., 0] = 0
    for index, each in zip(order, group, strict=True):
        for line, (seen, gap, resume) in zip(lines[index, 0], _of_each(each)[:rows].tolist(), strict=False):
            line[:resume] = hidden
            line[: min(gap, seen)] = 0
            line[resume:seen] = 0
    return Mask(there, length)
