"""Keys, values and deltas of the samples in a batch: preallocated, written in place, indexed by absolute row.

A slot holds one sample. Its keys and values lie in position order, so that the prefix cache (committed blocks) and the
block cache (the block being decoded) are one range, and a commit is nothing but a rewrite in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.models.config import ModelConfig


class KeyValueCache:
    def __init__(
        self, config: ModelConfig, *, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (slots * capacity, config.kv_heads, config.head_dim)
        # zeros: a row that is masked has weight 0, and 0 times what happens to be in memory may be NaN
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def write(self, layer: int, index: Tensor | slice, keys_NKE: Tensor, values_NKE: Tensor) -> None:
        """Puts packed rows at their places: a slice of them, or an index of slot * capacity + position."""
        self.keys[layer][index] = keys_NKE
        self.values[layer][index] = values_NKE

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives a slot the first `length` rows of another one."""
        for tensor in (*self.keys, *self.values):
            start, goal = source * self.capacity, target * self.capacity
            tensor[goal : goal + length] = tensor[start : start + length]

    def read(self, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """A slot's first `length` rows, as views [L, K, E]."""
        start = slot * self.capacity
        return self.keys[layer][start : start + length], self.values[layer][start : start + length]

    def by_slot(self, layer: int) -> tuple[Tensor, Tensor]:
        """All slots, as views [slots, capacity, K, E]."""
        shape = (self.slots, self.capacity, *self.keys[layer].shape[1:])
        return self.keys[layer].view(shape), self.values[layer].view(shape)


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
