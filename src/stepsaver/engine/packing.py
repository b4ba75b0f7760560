"""Turns the plans of several samples into index tensors over their packed rows."""

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

    A row sees everything before `start`, and all rows from there to the end of its block.
    """

    slot: int
    start: int
    tokens: Index
    block_size: int
    plan: StepPlan

    @property
    def seen(self) -> int:
        """How many rows of context the last row sees, its block included."""
        return self.start + len(self.tokens) - self.plan.hidden.bit_count()

    def lengths(self, rows: Rows) -> Index:
        """For each of `rows`, how many rows of the slot it sees."""
        ends = (row_index(rows) // self.block_size + 1) * self.block_size
        return np.minimum(self.start + ends, self.seen)


class PackedRows(NamedTuple):
    """The windows of all samples, one after the other."""

    tokens: Tensor
    positions: Tensor


class Subset(NamedTuple):
    """Some of a sequence of rows."""

    indices: Tensor | None  # None: all of them
    size: int

    def select(self, rows: Tensor) -> Tensor:
        return rows if self.indices is None else rows[self.indices]


class PartRows(NamedTuple):
    """Of the rows that go on, which ran this part, and which take its delta from the cache."""

    ran: Subset
    reused: Subset
    ran_delta_index: Tensor
    reused_delta_index: Tensor


class PackedRun(NamedTuple):
    """What consecutive layers that run the same rows share."""

    is_fused: bool  # one projection gives queries, keys and values of all rows
    keys_values: Subset
    keys_values_rotation: Rotation
    cache_rows: Tensor | None  # where the keys and values go, if there are any
    queries: Subset
    query_rotation: Rotation
    attending: Attending
    kept: Tensor | None  # the rows that go on after the keys and values; None: all
    attention: PartRows
    mlp: PartRows

    @property
    def is_whole(self) -> bool:
        """Whether every row writes its keys and values, and every row that goes on after that runs every part."""
        parts = (self.attention.ran, self.mlp.ran)
        return self.keys_values.indices is None and all(part.indices is None and part.size for part in parts)


def pack_rows(steps: Sequence[Step], device: torch.device) -> PackedRows:
    windows = [row_index(step.plan.window) for step in steps]
    tokens = np.concatenate([step.tokens[window] for step, window in zip(steps, windows, strict=True)])
    positions = np.concatenate([step.start + window for step, window in zip(steps, windows, strict=True)])
    return PackedRows(
        tokens=_tensor(tokens, device),
        positions=_tensor(positions, device),
    )


def run_end(steps: Sequence[Step], first: int) -> int:
    """The end of the run of layers that begins with `first`. Within it no sample's rows change and no rule is asked."""
    ends = {run.last for step in steps for run in step.plan.runs}
    ends |= {step.plan.ask_after + 1 for step in steps if step.plan.ask_after is not None}
    return min(end for end in ends if end > first)


class Packer:
    """Builds the index tensors of a forward. Layers that run the same rows share them, so each tensor is built, and
    copied to the device, once.
    """

    def __init__(
        self, rows: PackedRows, *, rotation: Rotation, cache: KeyValueCache, deltas: DeltaCache | None
    ) -> None:
        self.device = rows.tokens.device
        self.rotation, self.cache, self.deltas = rotation, cache, deltas
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)
        self._subsets: dict[tuple[tuple[Rows, ...], tuple[Rows, ...]], Subset] = {}
        self._rotations: dict[tuple[Rows, ...], Rotation] = {}
        self._cache_rows: dict[tuple[Rows, ...], Tensor | None] = {}
        self._attending: dict[tuple[Rows, ...], Attending] = {}
        self._delta_indices: dict[tuple[Rows, ...], Tensor] = {}

    def run(self, steps: Sequence[Step], layer: int) -> PackedRun:
        """The tensors for the run of layers that begins with `layer`. Steps may be planned again during a forward, but
        their windows, slots and positions stay the same.
        """
        windows = tuple(step.plan.window for step in steps)
        kept = tuple(step.plan.carried(layer) for step in steps)
        attention, keys_values, mlp = zip(*(step.plan.layers[layer] for step in steps), strict=True)
        written = self._subset(keys_values, windows)
        queries = self._subset(attention, windows)
        kept_rows = self._subset(kept, windows)
        if keys_values not in self._cache_rows:
            self._cache_rows[keys_values] = _cache_rows(steps, keys_values, self.cache) if written.size else None
        if attention not in self._attending:
            self._attending[attention] = plan_attending(_segments(steps, attention), self.cache)
        return PackedRun(
            is_fused=written.indices is None and queries.indices is None and kept_rows.indices is None,
            keys_values=written,
            keys_values_rotation=self._rotation(keys_values, written),
            cache_rows=self._cache_rows[keys_values],
            queries=queries,
            query_rotation=self._rotation(attention, queries),
            attending=self._attending[attention],
            kept=kept_rows.indices,
            attention=self._part(steps, attention, kept),
            mlp=self._part(steps, mlp, kept),
        )

    def _part(self, steps: Sequence[Step], ran: tuple[Rows, ...], kept: tuple[Rows, ...]) -> PartRows:
        reused = tuple(keep & ~run for keep, run in zip(kept, ran, strict=True))
        return PartRows(
            ran=self._subset(ran, kept),
            reused=self._subset(reused, kept),
            ran_delta_index=self._delta_index(steps, ran),
            reused_delta_index=self._delta_index(steps, reused),
        )

    def _subset(self, parts: tuple[Rows, ...], wholes: tuple[Rows, ...]) -> Subset:
        """The indices of the parts' rows in the sequence of all rows of the wholes."""
        if parts == wholes:
            return Subset(None, sum(map(int.bit_count, parts)))
        if not any(parts):
            return Subset(self._nothing, 0)
        if (parts, wholes) not in self._subsets:
            indices = _indices_within(parts, wholes)
            self._subsets[parts, wholes] = Subset(_tensor(indices, self.device), len(indices))
        return self._subsets[parts, wholes]

    def _rotation(self, parts: tuple[Rows, ...], subset: Subset) -> Rotation:
        if parts not in self._rotations:
            self._rotations[parts] = subset.select(self.rotation)
        return self._rotations[parts]

    def _delta_index(self, steps: Sequence[Step], parts: tuple[Rows, ...]) -> Tensor:
        if self.deltas is None or not any(parts):
            return self._nothing
        if parts not in self._delta_indices:
            size = self.deltas.block_size
            assert all(part.bit_length() <= size for part in parts), "deltas have room for one block"
            index = [step.slot * size + row_index(part) for step, part in zip(steps, parts, strict=True)]
            self._delta_indices[parts] = _tensor(np.concatenate(index), self.device)
        return self._delta_indices[parts]


def _indices_within(parts: Sequence[Rows], wholes: Sequence[Rows]) -> Index:
    indices: list[Index] = []
    offset = 0
    for part, whole in zip(parts, wholes, strict=True):
        if part:
            indices.append(offset + index_within(part, whole))
        offset += whole.bit_count()
    return np.concatenate(indices)


def _cache_rows(steps: Sequence[Step], written: Sequence[Rows], cache: KeyValueCache) -> Tensor:
    index = [row_index(rows) for rows in written]
    slots = np.repeat([step.slot for step in steps], [len(rows) for rows in index])
    return cache.row_indices(
        slots, np.concatenate([step.start + rows for step, rows in zip(steps, index, strict=True)])
    )


def _segments(steps: Sequence[Step], queries: Sequence[Rows]) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for step, rows in zip(steps, queries, strict=True):
        count = rows.bit_count()
        if count:
            segments.append(_segment(step, rows, start, start + count))
        start += count
    return segments


def _segment(step: Step, rows: Rows, start: int, stop: int) -> Segment:
    if step.seen - step.start <= step.block_size:  # one block: every row sees everything
        return Segment(start, stop, step.slot, step.seen, step.seen, 0)
    lengths = step.lengths(rows)
    growths = set(np.diff(lengths).tolist())
    growth = None if len(growths) > 1 else growths.pop() if growths else 0
    return Segment(start, stop, step.slot, int(lengths[0]), int(lengths[-1]), growth, lengths if growth != 0 else None)


def _tensor(array: Index, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
