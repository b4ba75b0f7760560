"""Consecutive layers in one call (`layers.c`, `reused_layers.c`): what they are made of, as the kernel takes it."""

from collections.abc import Sequence
from ctypes import byref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.backends.cpu.kernels import address, can_attend, check_rotation, segment_fields
from stepsaver.engine.backends.cpu.library import BLOCK, KINDS, LayersCall, Shape, has_run, library
from stepsaver.engine.backends.cpu.library import RowSubset as SubsetFields
from stepsaver.engine.backends.packed import AttentionRows, PackedRun, RowSubset
from stepsaver.engine.models.config import ModelConfig

if TYPE_CHECKING:
    from stepsaver.engine.cache import DeltaCache, KeyValueCache


class Map(NamedTuple):
    """A weight in blocks, and its bias."""

    blocks: Tensor
    bias: Tensor | None


class LayerParts(NamedTuple):
    """What a layer is made of."""

    maps: tuple[Map, ...]  # queries, keys and values; output; gate and up; down
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norms: Tensor | None  # [2 E]

    @property
    def tensors(self) -> list[Tensor | None]:
        """In the order of `Layer` in layer.h."""
        return [*(part for each in self.maps for part in each), self.attention_norm, self.mlp_norm, self.head_norms]


class PackedLayers:
    """All layers of a model, described as the kernel wants them."""

    def __init__(self, layers: Sequence[LayerParts], config: ModelConfig, *, is_large: bool) -> None:
        """`is_large`: a weight does not stay in a processor's caches, so threads share every product."""
        self.config, self.is_large = config, is_large
        queries, hidden = config.heads * config.head_dim, config.hidden
        width = queries + 2 * config.kv_heads * config.head_dim
        sizes = ((hidden, width), (queries, hidden), (hidden, 2 * config.mlp), (config.mlp, hidden))
        (self.dtype,) = {each.blocks.dtype for layer in layers for each in layer.maps}  # of all weights
        for layer in layers:
            for each, (inputs, outputs) in zip(layer.maps, sizes, strict=True):
                assert each.blocks.shape == (-(-outputs // BLOCK), inputs, BLOCK)
                assert each.bias is None or each.bias.shape == (outputs,)
            assert all(each is None or each.is_contiguous() for each in layer.tensors)
            beside = (*(each.bias for each in layer.maps), *layer[1:])
            assert all(each is None or each.dtype == torch.float32 for each in beside)
        self._layers = tuple(layers)  # keeps the memory that the addresses are of
        self.addresses = torch.tensor([[address(each) or 0 for each in layer.tensors] for layer in layers])

    def shape(self) -> Shape:
        config = self.config
        sizes = (config.heads, config.kv_heads, config.head_dim, config.hidden, config.mlp)
        return Shape(*sizes, KINDS[self.dtype], self.is_large, config.norm_eps)


def run_layers(
    packed: PackedLayers,
    span: range,
    h_ND: Tensor,
    run: PackedRun,
    cache: "KeyValueCache",
    deltas: "DeltaCache | None",
) -> Tensor | None:
    """Runs packed rows through consecutive layers, in place: all sublayers of all rows, or in small layers whose deltas
    are kept some of the rows of each. Returns the rows that go on. None: it cannot, and nothing has changed.
    """
    written, attended = run.written, run.attended
    attending = None if attended is None else attended.attending
    if attending is not None and (attending.alone or attending.grouped):
        return None
    is_reusing = not run.is_whole
    if is_reusing and (deltas is None or run.kept is not None or packed.is_large or not deltas.has(span)):
        return None
    rows, hidden = h_ND.shape
    assert h_ND.dtype == torch.float32
    assert h_ND.is_contiguous()
    assert hidden == packed.config.hidden
    assert cache.stored.is_contiguous()
    assert len(cache.by_layer) == len(packed.addresses) >= span.stop > span.start
    assert deltas is None or len(deltas.addresses) == len(packed.addresses)
    assert not is_reusing or all(
        sublayer.ran.size + sublayer.reused.size == rows for sublayer in (run.attention, run.mlp)
    )
    going = h_ND if run.kept is None else h_ND.new_empty((len(run.kept), hidden))
    attention, mlp = run.attention.ran, run.mlp.ran
    if run.is_whole:  # all that go on run everything: by their numbers among all rows
        attention = mlp = attention._replace(indices=run.kept)
    given = LayersCall(
        packed.addresses[span.start].data_ptr(),
        None if deltas is None else deltas.addresses[span.start].data_ptr(),
        h_ND.data_ptr(),
        going.data_ptr(),
        cache.by_layer[span.start].data_ptr(),
        *_rotation(written, packed.config.head_dim),
        *_rotation(attended, packed.config.head_dim),
        None if written is None else address(written.places),
        *segment_fields(attending, attention.size),
        _subset(None if written is None else written.rows),
        _subset(attention),
        _subset(mlp),
        _subset(run.attention.reused),
        _subset(run.mlp.reused),
        len(span),
        rows,
        0 if deltas is None else deltas.stored.shape[2],
        cache.slots,
        cache.capacity,
        packed.shape(),
    )
    kernel = library().stepsaver_run_reused_layers if is_reusing else library().stepsaver_run_layers
    return going if has_run(kernel(byref(given))) else None


def _rotation(rows: AttentionRows | None, head_dim: int) -> tuple[int | None, int | None]:
    if rows is None:
        return None, None
    rotation = rows.rotation
    check_rotation(rotation, rows.rows.size, head_dim)
    return rotation.turns.data_ptr(), address(rotation.query_scale)


def _subset(rows: RowSubset | None) -> SubsetFields:
    if rows is None:
        return SubsetFields(None, None, 0)
    for each in (rows.indices, rows.deltas):
        assert each is None or (each.dtype == torch.int64 and each.is_contiguous() and len(each) == rows.size)
    return SubsetFields(address(rows.indices), address(rows.deltas), rows.size)


def packed_layers(layers: Sequence[LayerParts | None], config: ModelConfig, *, is_large: bool) -> PackedLayers | None:
    """None unless all weights lie in blocks of one kind, and heads are of a width that the kernel attends."""
    packed = [layer for layer in layers if layer is not None]
    kinds = {each.blocks.dtype for layer in packed for each in layer.maps}
    if len(packed) < len(layers) or len(kinds) != 1 or not can_attend(config.head_dim, 0):
        return None
    return PackedLayers(packed, config, is_large=is_large)
