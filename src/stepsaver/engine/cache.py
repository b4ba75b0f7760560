"""Keys, values and deltas of the samples in a batch: preallocated, written in place, indexed by absolute row.

A slot holds one sample. Its keys and values lie in position order, so that the prefix cache (committed blocks) and the
block cache (the block being decoded) are one range, and a commit is nothing but a rewrite in place. The positions of a
head lie side by side, because attention of several samples is then a batch of matrix multiplications on a view.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.models.config import ModelConfig

Index = NDArray[np.int64]


class SlotRange(NamedTuple):
    """Rows of one slot that lie side by side, which are cheaper to write to than any others."""

    slot: int
    start: int
    stop: int


Places = SlotRange | Tensor  # or, row by row and head by head, the places among all rows of all heads of all slots


class KeyValueCache:
    def __init__(
        self, config: ModelConfig, *, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.capacity, self.kv_heads, self.device = slots, capacity, config.kv_heads, device
        shape = (slots, config.kv_heads, capacity, config.head_dim)
        # zeros: a row that is masked has weight 0, and 0 times what happens to be in memory may be NaN
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def places(self, slots: Index, positions: Index) -> Places:
        """Where packed rows belong."""
        slot, first, count = int(slots[0]), int(positions[0]), len(slots)
        side_by_side = slot == slots[-1] and positions[-1] - first + 1 == count and (slots == slot).all()
        if side_by_side and (np.diff(positions) == 1).all():
            return SlotRange(slot, first, first + count)
        heads = slots[:, None] * self.kv_heads + np.arange(self.kv_heads)
        return torch.from_numpy(heads * self.capacity + positions[:, None]).to(self.device, non_blocking=True)

    def write(self, layer: int, places: Places, keys_NKE: Tensor, values_NKE: Tensor) -> None:
        """Puts packed rows at their places."""
        for stored, rows in ((self.keys[layer], keys_NKE), (self.values[layer], values_NKE)):
            if isinstance(places, SlotRange):
                stored[places.slot, :, places.start : places.stop] = rows.transpose(0, 1)
            else:
                stored.view(-1, stored.shape[-1])[places] = rows

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first `length` rows of another one."""
        for tensor in (*self.keys, *self.values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def read(self, layer: int, slots: slice | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` rows of some slots [slots, K, L, E]; of a slice of them, as views."""
        return self.keys[layer][slots, :, :length], self.values[layer][slots, :, :length]


class PartDeltas(NamedTuple):
    attention: Tensor
    mlp: Tensor


class DeltaCache:
    """Per layer and part, the delta of each row of each slot's block. Only layers that a rule may reuse have one."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: frozenset[int],
        slots: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (slots * block_size, config.hidden)
        self.by_layer = {
            layer: PartDeltas(
                torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)
            )
            for layer in sorted(layers)
        }

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for deltas in self.by_layer.values() for tensor in deltas)
