"""Turns the plans of several samples into index tensors over their packed rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.attention import Segment, plan_attending
from stepsaver.engine.backends.packed import Attending, AttentionRows, PackedRun, RowSubset, SublayerRows
from stepsaver.engine.cache import DeltaCache, Index, KeyValueCache
from stepsaver.engine.models.rope import Rotation
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import Positions, index_within, position_index, position_list

RowSets = tuple[Positions, ...]  # one per step


class Layout(NamedTuple):
    """Of each token of a step: its position in the text, and where it lies and what it sees in its slot.

    A token sees the slot's first `seen` places, but not those from `gap` to `resume` - 1.
    """

    positions: Index
    places: Index  # of its keys and values
    views: Index  # [tokens, 3]: seen, gap, resume
    branches: Index  # the branch of speculative decoding that a token belongs to; -1: to the text, or to its draft
    predicted: Index  # the position whose token it predicts


class Step(NamedTuple):
    """One sample's share of a forward: the tokens from position `start` on, and the plan for them.

    A token sees everything before `start`, and all tokens from there to the end of its block; or what the layout says.
    """

    slot: int
    start: int
    tokens: Index
    block_size: int
    plan: StepPlan
    layout: Layout | None = None

    @property
    def seen(self) -> int:
        """How many places of its slot the last token sees, its block included."""
        if self.layout is not None:
            return int(self.layout.views[:, 0].max())
        return self.start + len(self.tokens) - self.plan.hidden.bit_count()

    def positions(self, index: Index) -> Index:
        """The positions in the text of some of the tokens."""
        return self.start + index if self.layout is None else self.layout.positions[index]

    def places(self, index: Index) -> Index:
        """Where the keys and values of some of the tokens lie in the slot."""
        return self.start + index if self.layout is None else self.layout.places[index]

    def views(self, index: Index) -> Index:
        """[tokens, 3]: how many places each of some tokens sees, and the gap in them. One line if it is the same."""
        if self.layout is not None:
            return self.layout.views[index]
        if self.seen - self.start <= self.block_size:  # one block
            return np.array([[self.seen, 0, 0]])
        views = np.zeros((len(index), 3), dtype=np.int64)
        views[:, 0] = np.minimum(self.start + (index // self.block_size + 1) * self.block_size, self.seen)
        return views

    def predicted(self) -> list[int]:
        """The positions whose tokens are predicted by the tokens that are read."""
        if self.layout is not None:
            return self.layout.predicted[position_index(self.plan.reads)].tolist()
        return [self.start + row for row in position_list(self.plan.predicted)]


class PackedRows(NamedTuple):
    """The windows of all samples, one after the other."""

    tokens: Tensor
    positions: Tensor


def pack_rows(steps: Sequence[Step], device: torch.device) -> PackedRows:
    windows = [position_index(step.plan.window) for step in steps]
    tokens = np.concatenate([step.tokens[window] for step, window in zip(steps, windows, strict=True)])
    positions = np.concatenate([step.positions(window) for step, window in zip(steps, windows, strict=True)])
    return PackedRows(_tensor(tokens, device), _tensor(positions, device))


def drafting_rows(steps: Sequence[Step], like: Tensor) -> Tensor | None:
    """[N, 1]: 1 for the tokens that draft, 0 for the others. None if no token does."""
    windows = [position_index(step.plan.window) for step in steps]
    drafting = np.concatenate(
        [
            np.full(len(window), -1) if step.layout is None else step.layout.branches[window]
            for step, window in zip(steps, windows, strict=True)
        ]
    )
    return _tensor(drafting[:, None] >= 0, like.device).to(like.dtype) if (drafting >= 0).any() else None


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
        self._subsets: dict[tuple[RowSets, RowSets], RowSubset] = {}
        self._rotations: dict[RowSets, Rotation] = {}
        self._places: dict[RowSets, Tensor] = {}
        self._attending: dict[RowSets, Attending] = {}
        self._deltas: dict[RowSets, Tensor] = {}

    def run(self, steps: Sequence[Step], layer: int) -> PackedRun:
        """The tensors for the run of layers that begins with `layer`. Steps may be planned again during a forward, but
        their windows, slots and positions stay the same.
        """
        windows = tuple(step.plan.window for step in steps)
        going = tuple(step.plan.carried(layer) for step in steps)
        attention, keys_values, mlp = zip(*(step.plan.layers[layer] for step in steps), strict=True)
        kept = self._subset(going, windows).indices
        sublayers = self._sublayer(steps, attention, going), self._sublayer(steps, mlp, going)
        return PackedRun(
            projected=self._projected(steps, keys_values, attention, windows, is_fused=kept is None),
            kept=kept,
            attention=sublayers[0],
            mlp=sublayers[1],
            is_whole=keys_values == windows and all(each.ran.indices is None and each.ran.size for each in sublayers),
        )

    def _projected(
        self, steps: Sequence[Step], written: RowSets, attending: RowSets, windows: RowSets, *, is_fused: bool
    ) -> tuple[AttentionRows, ...]:
        if is_fused and written == attending == windows:
            rows, rotation = RowSubset(None, sum(map(int.bit_count, windows))), self.rotation
            return (AttentionRows(rows, rotation, self._to_places(steps, written), self._to_attend(steps, attending)),)
        projected = []
        if any(written):
            rows, rotation = self._rotated(written, windows)
            projected.append(AttentionRows(rows, rotation, self._to_places(steps, written), None))
        if any(attending):
            rows, rotation = self._rotated(attending, windows)
            projected.append(AttentionRows(rows, rotation, None, self._to_attend(steps, attending)))
        return tuple(projected)

    def _rotated(self, parts: RowSets, windows: RowSets) -> tuple[RowSubset, Rotation]:
        subset = self._subset(parts, windows)
        if parts not in self._rotations:
            self._rotations[parts] = self.rotation if subset.indices is None else self.rotation[subset.indices]
        return subset, self._rotations[parts]

    def _to_places(self, steps: Sequence[Step], written: RowSets) -> Tensor:
        if written not in self._places:
            index = [position_index(rows) for rows in written]
            slots = np.repeat([step.slot for step in steps], [len(rows) for rows in index])
            places = np.concatenate([step.places(rows) for step, rows in zip(steps, index, strict=True)])
            self._places[written] = self.cache.places(slots, places)
        return self._places[written]

    def _to_attend(self, steps: Sequence[Step], queries: RowSets) -> Attending:
        if queries not in self._attending:
            self._attending[queries] = plan_attending(_segments(steps, queries), self.cache)
        return self._attending[queries]

    def _sublayer(self, steps: Sequence[Step], ran: RowSets, going: RowSets) -> SublayerRows:
        reused = tuple(rows & ~run for rows, run in zip(going, ran, strict=True))
        return SublayerRows(
            self._subset(ran, going)._replace(deltas=self._to_deltas(steps, ran)),
            self._subset(reused, going)._replace(deltas=self._to_deltas(steps, reused)),
        )

    def _subset(self, parts: RowSets, wholes: RowSets) -> RowSubset:
        """The indices of the parts' rows in the sequence of all rows of the wholes."""
        if parts == wholes:
            return RowSubset(None, sum(map(int.bit_count, parts)))
        if not any(parts):
            return RowSubset(self._nothing, 0)
        if (parts, wholes) not in self._subsets:
            indices = _indices_within(parts, wholes)
            self._subsets[parts, wholes] = RowSubset(_tensor(indices, self.device), len(indices))
        return self._subsets[parts, wholes]

    def _to_deltas(self, steps: Sequence[Step], parts: RowSets) -> Tensor | None:
        """Where the deltas of these rows are kept."""
        if self.deltas is None or not any(parts):
            return None
        if parts not in self._deltas:
            size = self.deltas.block_size
            assert all(part.bit_length() <= size for part in parts), "deltas have room for one block"
            index = [step.slot * size + position_index(part) for step, part in zip(steps, parts, strict=True)]
            self._deltas[parts] = _tensor(np.concatenate(index), self.device)
        return self._deltas[parts]


def _indices_within(parts: RowSets, wholes: RowSets) -> Index:
    indices: list[Index] = []
    offset = 0
    for part, whole in zip(parts, wholes, strict=True):
        if part:
            indices.append(offset + index_within(part, whole))
        offset += whole.bit_count()
    return np.concatenate(indices)


def _segments(steps: Sequence[Step], queries: RowSets) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for step, rows in zip(steps, queries, strict=True):
        count = rows.bit_count()
        if count:
            segments.append(Segment(start, start + count, step.slot, step.views(position_index(rows))))
        start += count
    return segments


def _tensor(array: Index | NDArray[np.bool_], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
