"""The network: pre-norm decoder layers whose parts return what they add to the residual stream.

A layer does not know its index, nor that caches and reuse exist. Its parts get `added`, a delta that the rows still
lack, and first add it in place. Attention is split in two: `project` returns queries, keys and values, the caller
rotates and mixes them, and `finish` returns the delta. Shape letters, here and everywhere: N packed rows (leading
dimensions in training), D hidden, H query heads, K key-value heads, E head dimension, F width of the MLP, V vocabulary,
L rows of context.
"""

from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine.backends.cpu import kernels
from stepsaver.engine.backends.cpu.layers import LayerMaps, LayerShape, LayerStack
from stepsaver.engine.backends.cpu.layouts import Slice
from stepsaver.engine.defaults import WEIGHTS, Weights
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.linear import LARGE, Embedding, Kept, Linear
from stepsaver.engine.models.rope import Rotation, rotate, rotation_table


class Projection(NamedTuple):
    queries: Tensor  # [N, H, E]
    keys: Tensor  # [N, K, E]
    values: Tensor


class Norm(nn.Module):
    """Root-mean-square norm.

    When prepared for inference, it moves its factor per column into the map after it, if the map can take it. With s
    the sum of a row's squares and w its width, x / sqrt(s / w + eps) is sqrt(w) x / sqrt(s + w eps).
    """

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps
        self.floor: Tensor | None = None  # sqrt(w eps), once prepared
        self.columns: Tensor | None = None  # the factor per column, once prepared, if it stays here
        self.has_kernel = False

    def scale(self, h_ND: Tensor, added: Tensor | None = None) -> Tensor:
        """The scaled rows. `added` is first added to them in place; a kernel does both at once."""
        if self.has_kernel:
            return kernels.scale_rows(h_ND, h_ND.shape[-1] * self.eps, added, self.columns)
        if added is not None:
            h_ND += added
        if self.floor is None:
            return F.rms_norm(h_ND, (h_ND.shape[-1],), self.weight, self.eps)
        lengths = torch.linalg.vector_norm(h_ND, dim=-1, keepdim=True)
        return h_ND / torch.hypot(lengths, self.floor, out=lengths)

    def prepare(self, following: Linear, *slices: Slice, weights: Weights) -> None:
        """Prepares the norm and the map after it. The map takes over the factor per column if it can."""
        width = self.weight.shape[0]
        self.floor = torch.tensor((width * self.eps) ** 0.5, dtype=self.weight.dtype)
        self.has_kernel = kernels.serve(self.weight.dtype, self.weight.device)
        scale = self.weight.detach() * width**0.5
        self.columns = None if following.prepare(*slices, scale=scale, weights=weights) else scale
        assert self.columns is None or self.has_kernel, "kernels serve wherever weights are kept in 16 bits"


class HeadNorms(nn.Module):
    """Root-mean-square norms of each head's queries and keys, before they are rotated."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * head_dim))  # of the queries, then of the keys
        self.eps = eps

    def queries(self, queries_NHE: Tensor) -> Tensor:
        return self._normed(queries_NHE, 0)

    def keys(self, keys_NKE: Tensor) -> Tensor:
        return self._normed(keys_NKE, 1)

    def _normed(self, heads: Tensor, which: int) -> Tensor:
        width = heads.shape[-1]
        return F.rms_norm(heads, (width,), self.weight[which * width : (which + 1) * width], self.eps)


class Attention(nn.Module):
    """The attention part with its norm. One fused weight holds queries, keys and values, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        query_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.query_rows = (0, query_width)
        self.kv_rows = (query_width, query_width + 2 * kv_width)
        self.norm = Norm(config.hidden, config.norm_eps)
        self.qkv = Linear(config.hidden, query_width + 2 * kv_width, bias=config.qkv_bias)
        self.output = Linear(query_width, config.hidden, bias=config.output_bias)
        self.head_norms = HeadNorms(config.head_dim, config.norm_eps) if config.head_norms else None

    def project(self, h_ND: Tensor, rows: Slice | None = None, added: Tensor | None = None) -> Tensor:
        """Queries, keys and values side by side, or only those of `query_rows` or `kv_rows`.

        They are not rotated yet, nor normed if heads have norms.
        """
        return self.qkv.project(self.norm.scale(h_ND, added), rows)

    def project_queries(self, h_ND: Tensor, added: Tensor | None = None) -> Tensor:
        return self.project(h_ND, self.query_rows, added)

    def project_keys_values(self, h_ND: Tensor, added: Tensor | None = None) -> Tensor:
        return self.project(h_ND, self.kv_rows, added)

    def project_rotated(self, h_ND: Tensor, rotation: Rotation) -> Projection:
        """Queries, keys and values, normed and rotated: for attention without a cache."""
        heads = self.project(h_ND).unflatten(-1, (-1, self.head_dim))
        queries, keys, values = heads.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), -2)
        if self.head_norms is not None:
            queries, keys = self.head_norms.queries(queries), self.head_norms.keys(keys)
        return Projection(rotate(queries, rotation), rotate(keys, rotation), values)

    def finish(self, mixed: Tensor) -> Tensor:
        """The delta, from the mixed values of all heads, side by side."""
        return self.output.project(mixed)

    def prepare(self, weights: Weights) -> None:
        self.norm.prepare(self.qkv, self.query_rows, self.kv_rows, weights=weights)
        self.output.prepare(weights=weights)


class Mlp(nn.Module):
    """The MLP part with its norm; one fused weight holds gate and up, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.has_kernel = False
        self.norm = Norm(config.hidden, config.norm_eps)
        self.gate_up = Linear(config.hidden, 2 * config.mlp, bias=config.mlp_bias)
        self.down = Linear(config.mlp, config.hidden, bias=config.mlp_bias)

    def forward(self, h_ND: Tensor, added: Tensor | None = None) -> Tensor:
        fused = self.gate_up.project(self.norm.scale(h_ND, added))
        if self.has_kernel:
            return self.down.project(kernels.silu_product(fused))
        gate, up = fused.chunk(2, -1)
        return self.down.project(F.silu(gate) * up)

    def prepare(self, weights: Weights) -> None:
        self.norm.prepare(self.gate_up, weights=weights)
        self.down.prepare(weights=weights)
        self.has_kernel = self.norm.has_kernel


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Mlp(config)
        self.parts = (self.attention, self.mlp)  # faster to look up than submodules

    def prepare(self, weights: Weights) -> None:
        self.attention.prepare(weights)
        self.mlp.prepare(weights)

    @property
    def maps(self) -> LayerMaps | None:
        """The layer's weights, for the kernel that runs whole layers. None if one of them is not in blocks."""
        attention, mlp = self.parts
        maps = (attention.qkv.map, attention.output.map, mlp.gate_up.map, mlp.down.map)
        norms = None if attention.head_norms is None else attention.head_norms.weight.detach()
        if any(each is None for each in maps):
            return None
        return LayerMaps(*maps, attention.norm.columns, mlp.norm.columns, norms)  # type: ignore[arg-type]


class Transformer(nn.Module):
    """Embedding, layers, final norm and head. `forward.run_step` and the training call its parts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.norm_eps)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the arithmetic; weights may be kept in fewer bits."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def rotations(self, positions: int) -> Rotation:
        """The rotation table of the first `positions` positions, on the model's device."""
        config = self.config
        table = rotation_table(config.rope, head_dim=config.head_dim, positions=positions, dtype=self.dtype)
        return table.to(self.device)

    def logits(self, h_ND: Tensor, added: Tensor | None = None) -> Tensor:
        return self.head.project(self.norm.scale(h_ND, added))

    def __getstate__(self) -> dict[str, Any]:
        """Without the stack, which names places in memory: a copy makes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "stack"}

    @cached_property
    def stack(self) -> LayerStack | None:
        """All layers, for the kernel that runs several in one call. None unless all weights lie in blocks of a kind."""
        maps = [cast(Layer, layer).maps for layer in self.layers]
        layers = [layer for layer in maps if layer is not None]
        config = self.config
        weights = [each.blocks for layer in layers for each in layer.maps]
        is_one_kind = len(layers) == len(maps) and len({each.dtype for each in weights}) == 1
        if not is_one_kind or not kernels.can_attend(config.head_dim, 0):
            return None
        shape = LayerShape(config.heads, config.kv_heads, config.head_dim, config.hidden, config.mlp, config.norm_eps)
        return LayerStack(layers, shape, is_large=any(each.numel() >= LARGE for each in weights))

    @property
    def kept(self) -> Kept:
        """How many numbers of all maps are kept in which precision."""
        return sum((module.kept for module in self.modules() if isinstance(module, Linear)), start=Kept())

    @property
    def bytes_per_weight(self) -> float:
        """The average over all maps."""
        kept = self.kept
        return (2 * kept.float16 + self.dtype.itemsize * kept.full) / (kept.float16 + kept.full)

    def sections(self) -> dict[str, tuple[nn.Module, ...]]:
        """What can be filled and prepared separately, in this order or with the head before the layers."""
        layers = {f"layers.{index}": (layer,) for index, layer in enumerate(self.layers)}
        return {"embedding": (self.embedding, self.norm), **layers, "head": (self.head,)}

    def prepare_section(self, name: str, weights: Weights = WEIGHTS) -> None:
        """Freezes a section for inference. On a CPU, in single or double precision, this changes the weights so that
        fewer operations are needed between the multiplications (a GPU has fused kernels for those).
        """
        self.__dict__.pop("stack", None)  # it was made of the weights as they were
        for module in self.sections()[name]:
            module.requires_grad_(False)
        if self.device.type != "cpu" or self.dtype not in (torch.float32, torch.float64):
            return
        if name == "head":
            self.norm.prepare(self.head, weights=weights)
            self.embedding.prepare(self.dtype, tied=self.head if self.config.tied else None)
        elif name != "embedding":
            layer = self.sections()[name][0]
            assert isinstance(layer, Layer)
            layer.prepare(weights)

    def prepare(self, weights: Weights = WEIGHTS) -> "Transformer":
        """Freezes all weights for inference."""
        for name in self.sections():
            self.prepare_section(name, weights)
        return self.eval()
