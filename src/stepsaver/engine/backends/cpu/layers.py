"""Consecutive layers in one call (`layers.c`): what they are made of, as the kernel takes it, and the call."""

from collections.abc import Sequence
from ctypes import Array, c_long
from typing import NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.backends.cpu.kernels import BLOCK, KINDS, can_attend, library


class Map(NamedTuple):
    """A weight in blocks, and its bias."""

    blocks: Tensor
    bias: Tensor | None


class LayerMaps(NamedTuple):
    """What a layer is made of. `columns` are factors that a norm leaves to be multiplied by; None: there are none."""

    qkv: Map
    output: Map
    gate_up: Map
    down: Map
    attention_columns: Tensor | None
    mlp_columns: Tensor | None
    head_norms: Tensor | None  # [2 E]

    @property
    def maps(self) -> tuple[Map, Map, Map, Map]:
        return self.qkv, self.output, self.gate_up, self.down


class KeptDeltas(NamedTuple):
    """Where what the parts of each layer add is kept: addresses [layers, 2], 0 for nowhere, and each row's index."""

    addresses: Tensor
    indices: Tensor


class Some(NamedTuple):
    """Some of the packed rows, and the index of each among a part's deltas, if it has any."""

    rows: Tensor | None  # None: all of them
    deltas: Tensor | None
    size: int

    def described(self) -> tuple[int, int, int]:
        for each in (self.rows, self.deltas):
            assert each is None or (each.dtype == torch.int64 and each.is_contiguous() and len(each) == self.size)
        rows, deltas = (0 if each is None else each.data_ptr() for each in (self.rows, self.deltas))
        return rows, deltas, self.size


class RowsOfParts(NamedTuple):
    """Which rows write keys and values, run each part, and take what it adds from the cache."""

    written: Some
    attention: Some
    mlp: Some
    attention_reused: Some
    mlp_reused: Some


class LayerShape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    eps: float


class LayerStack:
    """Layers that can run in one call, described as the kernel wants them."""

    def __init__(self, layers: Sequence[LayerMaps], shape: LayerShape, *, is_large: bool) -> None:
        """`is_large`: a weight does not stay in a processor's caches, so threads share every product."""
        self.shape, self.is_large = shape, is_large
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = (
            (shape.hidden, width),
            (shape.heads * shape.head_dim, shape.hidden),
            (shape.hidden, 2 * shape.mlp),
            (shape.mlp, shape.hidden),
        )
        (self.dtype,) = {each.blocks.dtype for layer in layers for each in layer.maps}  # of all weights
        for layer in layers:
            for each, (inputs, outputs) in zip(layer.maps, sizes, strict=True):
                assert each.blocks.shape == (-(-outputs // BLOCK), inputs, BLOCK)
                assert each.blocks.is_contiguous()
                assert each.bias is None or each.bias.shape == (outputs,)
            beside = (*(each.bias for each in layer.maps), *layer[4:])
            assert all(part is None or (part.dtype == torch.float32 and part.is_contiguous()) for part in beside)
        self._layers = tuple(layers)  # keeps the memory that the addresses are of
        flat = [[*(part for each in layer.maps for part in each), *layer[4:]] for layer in layers]
        self.addresses = torch.tensor([[0 if part is None else part.data_ptr() for part in parts] for parts in flat])

    def described(self, stored: Tensor) -> Array[c_long]:
        """The shape as the kernel takes it, with what it needs to know of the cache of all layers."""
        layers, _, kv_rows, capacity, head_dim = stored.shape
        shape = self.shape
        assert stored.dtype == torch.float32
        assert stored.is_contiguous()
        assert (layers, kv_rows, head_dim) == (len(self.addresses), 2 * shape.kv_heads, shape.head_dim)
        assert can_attend(head_dim, 0)
        sizes = (shape.heads, shape.kv_heads, head_dim, capacity, shape.hidden, shape.mlp)
        return (c_long * 8)(*sizes, KINDS[self.dtype], self.is_large)


def run_layers(
    stack: LayerStack,
    first: int,
    last: int,
    h_ND: Tensor,
    rotation: Tensor,
    stored: Tensor,
    cache_rows: Tensor,
    segments: Tensor,
    *,
    kept: Tensor | None = None,
    deltas: KeptDeltas | None = None,
) -> Tensor | None:
    """Runs packed rows, in place, through the layers from `first` to `last` - 1: all parts of all rows. Of a single
    layer, only the rows `kept` go on after the keys and values, if they are given; segments and deltas are of those.

    `stored` is the cache of all layers; the rest is as `mix` takes it, and every row that goes on is in a segment.
    Returns the hidden states of these rows. None: there was no memory for it, and nothing has changed.
    """
    described = stack.described(stored)
    rows, hidden = h_ND.shape
    assert h_ND.dtype == rotation.dtype == torch.float32
    assert h_ND.is_contiguous()
    assert rotation.is_contiguous()
    assert hidden == stack.shape.hidden
    assert 0 <= first < last <= len(stack.addresses)
    assert rotation.numel() == rows * 2 * stack.shape.head_dim
    assert cache_rows.dtype == segments.dtype == torch.int64
    assert cache_rows.shape == (rows,)
    assert segments.shape[1] == 5
    assert kept is None or (kept.dtype == torch.int64 and last - first == 1)
    going = h_ND if kept is None else h_ND.new_empty((len(kept), hidden))
    if deltas is not None:
        assert deltas.addresses.shape == (len(stack.addresses), 2)
        assert deltas.indices.shape == (len(going),)
    has_run = library().stepsaver_run_layers(
        stack.addresses[first].data_ptr(),
        described,
        h_ND.data_ptr(),
        rotation.data_ptr(),
        stored[first].data_ptr(),
        cache_rows.data_ptr(),
        segments.data_ptr(),
        None if deltas is None else deltas.addresses[first].data_ptr(),
        None if deltas is None else deltas.indices.data_ptr(),
        None if kept is None else kept.data_ptr(),
        None if kept is None else going.data_ptr(),
        0 if kept is None else len(kept),
        last - first,
        rows,
        len(segments),
        stored.stride(0),
        hidden * stack.shape.eps,
        stack.shape.eps,
    )
    return going if has_run else None


def run_reused_layers(
    stack: LayerStack,
    first: int,
    last: int,
    h_ND: Tensor,
    parts: RowsOfParts,
    rotations: tuple[Tensor, Tensor],
    stored: Tensor,
    cache_rows: Tensor | None,
    segments: Tensor | None,
    addresses: Tensor,
) -> bool:
    """The same for layers of which some rows reuse deltas: of the rows that write keys and values, then of those that
    attend, the rotations; of the former the cache rows; of the latter the segments. None: there are no such rows.

    `addresses` are those of the deltas. Returns whether there was memory for it; otherwise nothing has changed.
    """
    described = stack.described(stored)
    rows, hidden = h_ND.shape
    assert not stack.is_large
    assert h_ND.dtype == torch.float32
    assert h_ND.is_contiguous()
    assert hidden == stack.shape.hidden
    assert 0 <= first < last <= len(stack.addresses)
    assert addresses.shape == (len(stack.addresses), 2)
    assert addresses[first:last].all(), "a plan reuses a layer whose deltas nobody keeps"
    for some, rotation in zip((parts.written, parts.attention), rotations, strict=True):
        assert rotation.dtype == torch.float32
        assert rotation.is_contiguous()
        assert rotation.numel() == some.size * 2 * stack.shape.head_dim
    for ran, reused in ((parts.attention, parts.attention_reused), (parts.mlp, parts.mlp_reused)):
        assert ran.size + reused.size == rows
    assert parts.written.size == (0 if cache_rows is None else len(cache_rows))
    assert (parts.attention.size > 0) == (segments is not None)
    return bool(
        library().stepsaver_run_reused_layers(
            stack.addresses[first].data_ptr(),
            described,
            (c_long * 15)(*(value for some in parts for value in some.described())),
            h_ND.data_ptr(),
            *(rotation.data_ptr() for rotation in rotations),
            stored[first].data_ptr(),
            None if cache_rows is None else cache_rows.data_ptr(),
            None if segments is None else segments.data_ptr(),
            addresses[first].data_ptr(),
            last - first,
            0 if segments is None else len(segments),
            stored.stride(0),
            hidden * stack.shape.eps,
            stack.shape.eps,
        )
    )
