"""Keys, values and deltas of the samples in a batch: preallocated, written in place, indexed by absolute row.

A slot holds one sample. Its keys and values are in position order, so the prefix cache (committed blocks) and the block
cache (the block being decoded) are one range, and a commit just rewrites rows in place. The positions of a head are
next to each other, so attention reads them in one go. K key-value heads, E head dimension, D hidden, N packed rows.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stepsaver.engine.backends import Backend, backend_for
from stepsaver.engine.backends.backend import Index as Index
from stepsaver.engine.models.config import ModelConfig


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
        self,
        config: ModelConfig,
        *,
        slots: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend | None = None,
    ) -> None:
        self.backend = backend or backend_for(dtype, device)
        self.slots, self.capacity, self.device = slots, self.backend.places(capacity), device
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        # zeros: a masked row has weight 0, and 0 times whatever is in memory may be NaN
        shape = (config.layers, slots, 2 * config.kv_heads, self.capacity, config.head_dim)
        self.stored = self.backend.zeros(shape, dtype, device)
        self.by_layer = self.stored.unbind()
        self._contexts: dict[tuple[int, int, int], tuple[KeysValues, ...]] = {}

    @property
    def bytes(self) -> int:
        return self.stored.nbytes

    def places(self, slots: Index, positions: Index) -> Index:
        """Where the keys and values of packed rows go [N, 2]."""
        assert slots.max() < self.slots
        assert positions.max() < self.capacity
        return np.stack((slots, positions), 1)

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


class SublayerDeltas(NamedTuple):
    """What the sublayers of a layer added to each row; None: it is not kept."""

    attention: Tensor | None = None
    mlp: Tensor | None = None


class DeltaCache:
    """Per layer and sublayer, the delta of each row of each slot's block: of layers that a rule may reuse."""

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
        self.stored = torch.empty((len(self.kept), 2, slots * block_size, config.hidden), dtype=dtype, device=device)
        deltas = (SublayerDeltas(*each.unbind()) for each in self.stored.unbind())
        self.by_layer = dict(zip(self.kept, deltas, strict=True))

    @cached_property
    def addresses(self) -> Tensor:
        """Where each layer's deltas are in memory [layers, 2]; 0 for a layer whose deltas are not kept."""
        kept = [self.by_layer.get(layer, SublayerDeltas()) for layer in range(self.layers)]
        return torch.tensor([[0 if each is None else each.data_ptr() for each in deltas] for deltas in kept])

    def has(self, layers: range) -> bool:
        """Whether the deltas of all these layers are kept."""
        return all(layer in self.by_layer for layer in layers)

    def read(self, layers: range, indices: Tensor) -> Tensor:
        """Copies the deltas of some rows in consecutive layers [layers, 2, N, D]."""
        place = self.kept.index(layers.start)
        return self.stored[place : place + len(layers)].index_select(2, indices)

    @property
    def bytes(self) -> int:
        return self.stored.nbytes
