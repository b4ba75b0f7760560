"""From the plans of several samples to index tensors over their packed rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepsaver.engine.attention import Attending, Segment, plan_attending
from stepsaver.engine.cache import DeltaCache, Index, KeyValueCache
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.rows import Rows, index_within, row_index


class Step(NamedTuple):
    """One sample's share of a forward: the tokens from position `start` on, and the plan for them.

    A row sees everything before `start`, and from there on all rows up to the end of its block.
    """

    slot: int
    start: int
    tokens: Index
    block_size: int
    plan: StepPlan

    @property
    def seen(self) -> int:
        """Rows of context that its last row sees, its block included."""
        return self.start + len(self.tokens) - self.plan.hidden.bit_count()

    def lengths(self, rows: Rows) -> Index:
        """How many rows of its slot each of some rows sees."""
        ends = (row_index(rows) // self.block_size + 1) * self.block_size
        return np.minimum(self.start + ends, self.seen)


class PackedRows(NamedTuple):
    """The windows of all samples, one after the other."""

    tokens: Tensor
    positions: Tensor


class Subset(NamedTuple):
    """Some of a sequence of rows."""

    places: Tensor | None  # None: all of them
    size: int

    def select(self, rows: Tensor) -> Tensor:
        return rows if self.places is None else rows[self.places]


class PartRows(NamedTuple):
    """The rows of one part among those that go on: which ran, which take their delta from the cache."""

    ran: Subset
    reused: Subset
    ran_delta_index: Tensor
    reused_delta_index: Tensor


class PackedRun(NamedTuple):
    """What consecutive layers that run the same rows share."""

    is_fused: bool  # queries, keys and values of all rows: one projection
    keys_values: Subset
    keys_values_rotation: Rotation
    places: Tensor | None  # of the keys and values, if there are any
    queries: Subset
    query_rotation: Rotation
    attending: Attending
    kept: Tensor | None  # the rows that go on after the keys and values; None: all
    attention: PartRows
    mlp: PartRows


def pack_rows(steps: Sequence[Step], device: torch.device) -> PackedRows:
    windows = [row_index(step.plan.window) for step in steps]
    tokens = np.concatenate([step.tokens[window] for step, window in zip(steps, windows, strict=True)])
    positions = np.concatenate([step.start + window for step, window in zip(steps, windows, strict=True)])
    return PackedRows(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
    )


def run_end(steps: Sequence[Step], first: int) -> int:
    """The end of the run of layers that begins with `first`: no sample's rows change, and no rule is asked, within."""
    ends = {run.last for step in steps for run in step.plan.runs}
    ends |= {step.plan.ask_after + 1 for step in steps if step.plan.ask_after is not None}
    return min(end for end in ends if end > first)


def pack_run(
    steps: Sequence[Step],
    layer: int,
    *,
    rows: PackedRows,
    rotation: Rotation,
    cache: KeyValueCache,
    deltas: DeltaCache | None,
) -> PackedRun:
    """The index tensors of the run of layers that begins with `layer`."""
    device = rows.tokens.device
    windows = [step.plan.window for step in steps]
    kept = [step.plan.carried(layer) for step in steps]
    attention, keys_values, mlp = map(list, zip(*(step.plan.layers[layer] for step in steps), strict=True))
    written = _subset(keys_values, windows, device)
    queries = _subset(attention, windows, device)
    kept_rows = queries if kept == attention else _subset(kept, windows, device)
    return PackedRun(
        is_fused=written.places is None and queries.places is None and kept_rows.places is None,
        keys_values=written,
        keys_values_rotation=written.select(rotation),
        places=_places(steps, keys_values, cache) if written.size else None,
        queries=queries,
        query_rotation=queries.select(rotation),
        attending=plan_attending(_segments(steps, attention), cache),
        kept=kept_rows.places,
        attention=_part(steps, attention, kept, deltas, device),
        mlp=_part(steps, mlp, kept, deltas, device),
    )


def _part(
    steps: Sequence[Step], ran: list[Rows], kept: list[Rows], deltas: DeltaCache | None, device: torch.device
) -> PartRows:
    reused = [keep & ~run for keep, run in zip(kept, ran, strict=True)]
    return PartRows(
        ran=_subset(ran, kept, device),
        reused=_subset(reused, kept, device),
        ran_delta_index=_delta_index(steps, ran, deltas, device),
        reused_delta_index=_delta_index(steps, reused, deltas, device),
    )


def _subset(parts: list[Rows], wholes: list[Rows], device: torch.device) -> Subset:
    """Where the rows of each part lie in the sequence of all rows of the wholes."""
    size = sum(map(int.bit_count, parts))
    if parts == wholes:
        return Subset(None, size)
    if not size:
        return Subset(torch.empty(0, dtype=torch.int64, device=device), 0)
    places: list[Index] = []
    offset = 0
    for part, whole in zip(parts, wholes, strict=True):
        if part:
            places.append(offset + index_within(part, whole))
        offset += whole.bit_count()
    return Subset(_tensor(np.concatenate(places), device), size)


def _places(steps: Sequence[Step], written: list[Rows], cache: KeyValueCache) -> Tensor:
    index = [row_index(rows) for rows in written]
    slots = np.repeat([step.slot for step in steps], [len(rows) for rows in index])
    return cache.places(slots, np.concatenate([step.start + rows for step, rows in zip(steps, index, strict=True)]))


def _delta_index(steps: Sequence[Step], parts: list[Rows], deltas: DeltaCache | None, device: torch.device) -> Tensor:
    if deltas is None:
        return torch.empty(0, dtype=torch.int64, device=device)
    index = [step.slot * deltas.block_size + row_index(part) for step, part in zip(steps, parts, strict=True)]
    return _tensor(np.concatenate(index), device)


def _segments(steps: Sequence[Step], queries: list[Rows]) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for step, rows in zip(steps, queries, strict=True):
        count = rows.bit_count()
        if count:
            segments.append(_segment(step, rows, start, start + count))
        start += count
    return segments


def _segment(step: Step, rows: Rows, start: int, stop: int) -> Segment:
    if step.seen - step.start <= step.block_size:  # one block: all see everything
        return Segment(start, stop, step.slot, step.seen, step.seen, 0)
    lengths = step.lengths(rows)
    growths = set(np.diff(lengths).tolist())
    growth = None if len(growths) > 1 else growths.pop() if growths else 0
    return Segment(start, stop, step.slot, int(lengths[0]), int(lengths[-1]), growth, lengths if growth != 0 else None)


def _tensor(array: Index, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
