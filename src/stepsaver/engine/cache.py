"""Keys, values and deltas of the samples in a batch: preallocated, written in place, indexed by absolute row.

A slot holds one sample. Its keys and values are in position order, so the prefix cache (committed blocks) and the block
cache (the block being decoded) are one range, and a commit just rewrites rows in place. The positions of a head are
next to each other, so attention reads them in one go.
"""

from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.backends.cpu import kernels
from stepsaver.engine.backends.cpu.large_pages import HAS_LARGE_PAGES, map_large_pages
from stepsaver.engine.models.config import ModelConfig

Index = NDArray[np.int64]


class KeysValues(NamedTuple):
    keys: Tensor
    values: Tensor


VIEWS = 64  # sets of views that are kept; then all are dropped


class KeyValueCache:
    """Per layer [slots, 2 K, capacity, E]: a slot's keys, head by head, then its values.

    The views that attention reads are made for all layers at once and kept, because making one costs as much as a
    small operation.
    """

    def __init__(
        self, config: ModelConfig, *, slots: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.slots, self.capacity, self.kv_heads, self.device = slots, capacity, config.kv_heads, device
        shape = (config.layers, slots, 2 * config.kv_heads, capacity, config.head_dim)
        # zeros: a masked row has weight 0, and 0 times whatever is in memory may be NaN
        self.stored = _zeros(shape, dtype, device)
        self.has_kernel = kernels.serve(dtype, device)
        self.by_layer = self.stored.unbind()
        self._contexts: dict[tuple[int, int, int], tuple[KeysValues, ...]] = {}

    @property
    def bytes(self) -> int:
        return self.stored.nbytes

    def row_indices(self, slots: Index, positions: Index) -> Tensor:
        """Where packed rows go: indices of their first head [N] among all rows of all heads of all slots.

        Without a kernel, the indices of all their heads [N, 2 K].
        """
        assert slots.max() < self.slots
        assert positions.max() < self.capacity
        indices = slots * (2 * self.kv_heads * self.capacity) + positions
        if not self.has_kernel:
            indices = indices[:, None] + np.arange(2 * self.kv_heads) * self.capacity
        return torch.from_numpy(indices).to(self.device, non_blocking=True)

    def write(self, layer: int, indices: Tensor, keys_values: Tensor) -> None:
        """Writes packed rows [N, 2 K, E] at their indices. Used where no kernel does it."""
        self.by_layer[layer].view(-1, self.stored.shape[-1])[indices] = keys_values

    def kernel_attends(self, length: int) -> bool:
        """Whether our own kernel can attend to a context of `length` rows."""
        return self.has_kernel and kernels.can_attend(self.stored.shape[-1], length)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` rows of one slot to another."""
        self.stored[:, target, :, :length] = self.stored[:, source, :, :length]

    def read(self, layer: int, slots: slice | Tensor, length: int) -> KeysValues:
        """The first `length` rows of some slots [slots, K, L, E]; views if `slots` is a slice."""
        if isinstance(slots, slice):
            return self._context(slots.start, slots.stop, length)[layer]
        keys, values = self.stored[layer][slots, :, :length].chunk(2, 1)
        return KeysValues(keys, values)

    def _context(self, first: int, last: int, length: int) -> tuple[KeysValues, ...]:
        """Per layer, views of the first `length` rows of slots `first` to `last` - 1."""
        key = (first, last, length)
        if key not in self._contexts:
            if len(self._contexts) == VIEWS:
                self._contexts.clear()
            keys, values = self.stored[:, first:last, :, :length].chunk(2, 2)
            self._contexts[key] = tuple(map(KeysValues, keys.unbind(), values.unbind()))
        return self._contexts[key]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU in large pages: attention reads a few kB of each of many heads, which lie far apart."""
    count = prod(shape)
    if device.type != "cpu" or not HAS_LARGE_PAGES or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(map_large_pages(count * dtype.itemsize), dtype=dtype, count=count).view(shape)


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
        self.block_size, self.layers, self.kept = block_size, config.layers, sorted(layers)
        shape = (len(self.kept), 2, slots * block_size, config.hidden)
        self.stored = torch.empty(shape, dtype=dtype, device=device)
        parts = (PartDeltas(*each.unbind()) for each in self.stored.unbind())
        self.by_layer = dict(zip(self.kept, parts, strict=True))

    @cached_property
    def addresses(self) -> Tensor:
        """Where each layer's deltas are in memory [layers, 2]; 0 for a layer whose deltas are not kept."""
        kept = [self.by_layer.get(layer, ()) for layer in range(self.layers)]
        return torch.tensor([[part.data_ptr() for part in parts] or [0, 0] for parts in kept])

    def has(self, first: int, last: int) -> bool:
        """Whether the deltas of all layers from `first` to `last` - 1 are kept."""
        return all(layer in self.by_layer for layer in range(first, last))

    def read(self, first: int, last: int, indices: Tensor) -> Tensor:
        """Copies the deltas of some rows in the layers from `first` to `last` - 1 [layers, 2, N, D]."""
        place = self.kept.index(first)
        return self.stored[place : place + last - first].index_select(2, indices)

    @property
    def bytes(self) -> int:
        return self.stored.nbytes


def keep_deltas(stored: Tensor, indices: Tensor, delta_ND: Tensor) -> None:
    """Writes the deltas of packed rows at their indices among those of one layer and part."""
    if kernels.serve(stored.dtype, stored.device):
        kernels.copy_rows(delta_ND, stored, indices)
    else:
        stored.index_copy_(0, indices, delta_ND)
