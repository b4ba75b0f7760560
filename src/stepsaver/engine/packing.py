"""Turns the plans of several samples into index tensors over their packed rows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
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


class Projected(NamedTuple):
    """Rows of which queries, keys and values, or both are made. They are turned when their positions have been sent."""

    parts: RowSets
    rows: RowSubset
    places: Tensor | None
    attending: Attending | None


class Packer:
    """Builds the index tensors of a forward. Layers that run the same rows share them, so each tensor is built once,
    and all are sent to the device together.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        rotations: Rotation,
        cache: KeyValueCache,
        deltas: DeltaCache | None,
        is_adapted: bool = False,
    ) -> None:
        self.cache, self.deltas = cache, deltas
        self.upload = cache.backend.upload(cache.device)
        windows = [position_index(step.plan.window) for step in steps]
        tokens = np.concatenate([step.tokens[window] for step, window in zip(steps, windows, strict=True)])
        positions = np.concatenate([step.positions(window) for step, window in zip(steps, windows, strict=True)])
        self.tokens, self.positions = self.upload.tensor(tokens), self.upload.tensor(positions)
        self.drafting = self._drafting(steps) if is_adapted else None
        self._all = rotations  # of all positions
        self._rotations: dict[RowSets, Rotation] = {}
        self._nothing = torch.empty(0, dtype=torch.int64, device=cache.device)
        self._subsets: dict[tuple[RowSets, RowSets], RowSubset] = {}
        self._places: dict[RowSets, Tensor] = {}
        self._attending: dict[RowSets, Attending] = {}
        self._deltas: dict[RowSets, Tensor] = {}

    def runs(self, steps: Sequence[Step], first: int) -> list[tuple[range, PackedRun]]:
        """The runs of layers from `first` on, to where a rule is asked. Steps may be planned again there, but their
        windows, slots and positions stay the same.
        """
        asked = {step.plan.ask_after + 1 for step in steps if step.plan.ask_after is not None}
        ends = sorted(asked.union(run.last for step in steps for run in step.plan.runs))
        packed = []
        for last in ends:  # within a run no sample's positions change and no rule is asked
            if last > first:
                packed.append((range(first, last), *self._run(steps, first)))
                first = last
                if last in asked:
                    break
        self.upload.send()
        windows = tuple(step.plan.window for step in steps)
        return [
            (layers, run._replace(projected=tuple(self._turned(each, windows) for each in projected)))
            for layers, run, projected in packed
        ]

    def _drafting(self, steps: Sequence[Step]) -> Tensor | None:
        """[N, 1]: 1 for the tokens that draft, 0 for the others. None if no token does."""
        windows = [position_index(step.plan.window) for step in steps]
        branches = [
            np.full(len(window), -1) if step.layout is None else step.layout.branches[window]
            for step, window in zip(steps, windows, strict=True)
        ]
        drafting = np.concatenate(branches)[:, None] >= 0
        if not drafting.any():
            return None
        here, there = self.upload.empty(drafting.shape, self.cache.stored.dtype)
        here.copy_(torch.from_numpy(drafting))
        return there

    def _run(self, steps: Sequence[Step], layer: int) -> tuple[PackedRun, list[Projected]]:
        """The tensors for the run of layers that begins with `layer`, and what their projections are."""
        windows = tuple(step.plan.window for step in steps)
        going = tuple(step.plan.carried(layer) for step in steps)
        attention, keys_values, mlp = zip(*(step.plan.layers[layer] for step in steps), strict=True)
        kept = self._subset(going, windows).indices
        sublayers = self._sublayer(steps, attention, going), self._sublayer(steps, mlp, going)
        is_whole = keys_values == windows and all(each.ran.indices is None and each.ran.size for each in sublayers)
        projected = self._projected(steps, keys_values, attention, windows, is_fused=kept is None)
        return PackedRun((), kept, *sublayers, is_whole), projected

    def _projected(
        self, steps: Sequence[Step], written: RowSets, attending: RowSets, windows: RowSets, *, is_fused: bool
    ) -> list[Projected]:
        if is_fused and written == attending == windows:
            places, seen = self._to_places(steps, written), self._to_attend(steps, attending)
            return [Projected(windows, self._subset(windows, windows), places, seen)]
        projected = []
        if any(written):
            rows = self._subset(written, windows)
            projected.append(Projected(written, rows, self._to_places(steps, written), None))
        if any(attending):
            rows = self._subset(attending, windows)
            projected.append(Projected(attending, rows, None, self._to_attend(steps, attending)))
        return projected

    def _turned(self, projected: Projected, windows: RowSets) -> AttentionRows:
        parts, rows, places, attending = projected
        if windows not in self._rotations:
            self._rotations[windows] = self._all[self.positions]
        if parts not in self._rotations:
            assert rows.indices is not None
            self._rotations[parts] = self._rotations[windows][rows.indices]
        return AttentionRows(rows, self._rotations[parts], places, attending)

    def _to_places(self, steps: Sequence[Step], written: RowSets) -> Tensor:
        if written not in self._places:
            index = [position_index(rows) for rows in written]
            slots = np.repeat([step.slot for step in steps], [len(rows) for rows in index])
            places = np.concatenate([step.places(rows) for step, rows in zip(steps, index, strict=True)])
            self._places[written] = self.upload.tensor(self.cache.places(slots, places))
        return self._places[written]

    def _to_attend(self, steps: Sequence[Step], queries: RowSets) -> Attending:
        if queries not in self._attending:
            self._attending[queries] = plan_attending(_segments(steps, queries), self.cache, self.upload)
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
            self._subsets[parts, wholes] = RowSubset(self.upload.tensor(indices), len(indices))
        return self._subsets[parts, wholes]

    def _to_deltas(self, steps: Sequence[Step], parts: RowSets) -> Tensor | None:
        """Where the deltas of these rows are kept."""
        if self.deltas is None or not any(parts):
            return None
        if parts not in self._deltas:
            size = self.deltas.block_size
            assert all(part.bit_length() <= size for part in parts), "deltas have room for one block"
            index = [step.slot * size + position_index(part) for step, part in zip(steps, parts, strict=True)]
            self._deltas[parts] = self.upload.tensor(np.concatenate(index))
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
