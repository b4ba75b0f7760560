"""Single precision on a CPU. Between the matrix multiplications of a layer lies one call of C, or none: layers whose
weights lie in blocks run in one call. Every number is the one that the operations by themselves give.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stepsaver.engine.backends import torch_attention
from stepsaver.engine.backends.backend import Backend, Layers, Slice, Weight
from stepsaver.engine.backends.cpu import kernels, library
from stepsaver.engine.backends.cpu.large_pages import zeros
from stepsaver.engine.backends.cpu.layers import LayerParts, PackedLayers, packed_layers, run_layers
from stepsaver.engine.backends.cpu.weights import Blocks, pack_weight
from stepsaver.engine.backends.packed import AttentionRows, PackedRun

if TYPE_CHECKING:
    from stepsaver.engine.cache import DeltaCache, KeyValueCache
    from stepsaver.engine.defaults import Weights
    from stepsaver.engine.models.transformer import HeadNorms, Layer, Transformer


class CpuWithoutKernels(Backend):
    """Where the kernels are not compiled: weights packed by oneDNN, and caches in large pages."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return zeros(shape, dtype)

    def pack_weight(
        self, weight: Tensor, bias: Tensor | None, slices: Sequence[Slice], choice: "Weights", *, is_large: bool
    ) -> Weight | None:
        return pack_weight(weight, bias, slices, choice, is_large=is_large)


class Cpu(CpuWithoutKernels):
    has_kernels = True

    def pack_layers(self, model: "Transformer") -> Layers | None:
        large = any(layer.is_large for layer in model.each_layer)
        return packed_layers([_parts(layer) for layer in model.each_layer], model.config, is_large=large)

    def rms_norm(self, h_ND: Tensor, norm_weight: Tensor, eps: float, pending: Tensor | None = None) -> Tensor:
        return kernels.rms_norm(h_ND, norm_weight, eps, pending)

    def silu_product(self, gate_up: Tensor) -> Tensor:
        return kernels.silu_product(gate_up)

    def argmax(self, logits_NV: Tensor, mask_id: int) -> Tensor:
        return kernels.argmax(logits_NV, mask_id)

    def copy_rows(self, x_ND: Tensor, stored: Tensor, indices: Tensor) -> None:
        kernels.copy_rows(x_ND, stored, indices)

    def attends(self, head_dim: int, length: int) -> bool:
        return kernels.can_attend(head_dim, length)

    def attend(
        self, projected: Tensor, rows: AttentionRows, cache: "KeyValueCache", layer: int, norms: "HeadNorms | None"
    ) -> Tensor | None:
        attending = rows.attending
        mixed = kernels.attend(
            projected,
            rows.rotation,
            cache.by_layer[layer],
            rows.places,
            attending,
            None if norms is None else kernels.Norms(norms.weight, norms.eps),
        )
        if attending is None or not (attending.alone or attending.grouped):
            return mixed
        heads_NHE = projected.view(len(projected), -1, cache.head_dim)
        queries = heads_NHE.shape[1] - (0 if rows.places is None else 2 * cache.kv_heads)
        return torch_attention.attend(heads_NHE[:, :queries], cache, layer, attending, out=mixed)

    def run_layers(
        self,
        layers: Layers,
        span: range,
        h_ND: Tensor,
        run: PackedRun,
        cache: "KeyValueCache",
        deltas: "DeltaCache | None",
    ) -> Tensor | None:
        assert isinstance(layers, PackedLayers)
        return run_layers(layers, span, h_ND, run, cache, deltas)


def _parts(layer: "Layer") -> LayerParts | None:
    """What a layer is made of. None: a weight does not lie in blocks."""
    attention, mlp = layer.attention, layer.mlp
    packed = [each.packed for each in (attention.qkv, attention.output, mlp.gate_up, mlp.down)]
    maps = tuple(each.map for each in packed if isinstance(each, Blocks) and each.map is not None)
    if len(maps) < len(packed):
        return None
    head_norms = None if attention.head_norms is None else attention.head_norms.weight.detach()
    return LayerParts(maps, attention.norm.weight.detach(), mlp.norm.weight.detach(), head_norms)


CPU: Backend = Cpu() if library.is_loaded() else CpuWithoutKernels()
