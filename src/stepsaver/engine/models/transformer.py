"""The network: pre-norm decoder layers whose sublayers return what they add to the residual stream.

A layer does not know its index, nor that caches and reuse exist. Its sublayers get the residual that is `pending`,
which the rows still lack, and first add it in place. Attention is split in two: `project` returns queries, keys and
values, the caller rotates and mixes them, and `finish` returns the delta. Shape letters, here and everywhere: N packed
rows (leading dimensions in training), D hidden, H query heads, K key-value heads, E head dimension, F width of the MLP,
V vocabulary, L rows of context.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine.backends import TORCH, Backend, backend_for
from stepsaver.engine.backends.backend import Layers, Slice
from stepsaver.engine.defaults import WEIGHTS, Weights
from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.linear import Embedding, Kept, Linear
from stepsaver.engine.models.rope import Rotation, rotate, rotation_table

if TYPE_CHECKING:
    from stepsaver.engine.models.adapter import DraftAdapter


class Projection(NamedTuple):
    queries: Tensor  # [N, H, E]
    keys: Tensor  # [N, K, E]
    values: Tensor


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps
        self.backend = TORCH

    def forward(self, h_ND: Tensor, pending: Tensor | None = None) -> Tensor:
        """The normed rows. A pending residual is first added to them in place."""
        return self.backend.rms_norm(h_ND, self.weight, self.eps, pending)


class HeadNorms(nn.Module):
    """Root-mean-square norms of each head's queries and keys, before they are rotated."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2 * head_dim))  # of the queries, then of the keys
        self.eps = eps

    def forward(self, heads_NHE: Tensor, queries: int) -> Tensor:
        """Normed heads, of which the first are queries and the others are keys."""
        width = heads_NHE.shape[-1]
        heads = heads_NHE.tensor_split((queries,), -2)
        weights = self.weight.split(width)
        normed = [F.rms_norm(x, (width,), weight, self.eps) for x, weight in zip(heads, weights, strict=True)]
        return torch.cat(normed, -2)


class Attention(nn.Module):
    """Attention with its norm. One fused weight holds queries, keys and values, in this order."""

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

    def rows_of(self, *, queries: bool, keys_values: bool) -> Slice | None:
        """The rows of the weight that give queries, keys and values, or both."""
        if queries and keys_values:
            return None
        return self.query_rows if queries else self.kv_rows

    def project(self, h_ND: Tensor, pending: Tensor | None = None, rows: Slice | None = None) -> Tensor:
        """Queries, keys and values side by side, or only those of `rows_of`. They are not rotated yet, nor normed."""
        return self.qkv.project(self.norm(h_ND, pending), rows)

    def project_rotated(self, h_ND: Tensor, rotation: Rotation) -> Projection:
        """Queries, keys and values, normed and rotated: for attention without a cache."""
        heads = self.project(h_ND).unflatten(-1, (-1, self.head_dim))
        turned, values = heads.tensor_split((self.heads + self.kv_heads,), -2)
        normed = turned if self.head_norms is None else self.head_norms(turned, self.heads)
        queries, keys = rotate(normed, rotation).tensor_split((self.heads,), -2)
        if rotation.query_scale is not None:
            queries = queries * rotation.query_scale[..., None, None]
        return Projection(queries, keys, values)

    def finish(self, mixed: Tensor) -> Tensor:
        """The delta, from the mixed values of all heads, side by side."""
        return self.output.project(mixed)

    def prepare(self, backend: Backend, weights: Weights) -> None:
        self.norm.backend = backend
        self.qkv.prepare(backend, self.query_rows, self.kv_rows, weights=weights)
        self.output.prepare(backend, weights=weights)


class Mlp(nn.Module):
    """The MLP with its norm; one fused weight holds gate and up, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.backend = TORCH
        self.norm = Norm(config.hidden, config.norm_eps)
        self.gate_up = Linear(config.hidden, 2 * config.mlp, bias=config.mlp_bias)
        self.down = Linear(config.mlp, config.hidden, bias=config.mlp_bias)

    def forward(self, h_ND: Tensor, pending: Tensor | None = None) -> Tensor:
        return self.down.project(self.backend.silu_product(self.gate_up.project(self.norm(h_ND, pending))))

    def prepare(self, backend: Backend, weights: Weights) -> None:
        self.backend = self.norm.backend = backend
        self.gate_up.prepare(backend, weights=weights)
        self.down.prepare(backend, weights=weights)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Mlp(config)

    @property
    def is_large(self) -> bool:
        """Whether a weight does not stay in a processor's caches."""
        return any(isinstance(module, Linear) and module.is_large for module in self.modules())

    def prepare(self, backend: Backend, weights: Weights) -> None:
        self.attention.prepare(backend, weights)
        self.mlp.prepare(backend, weights)


class Transformer(nn.Module):
    """Embedding, layers, final norm and head. `forward.run_step` and the training call its parts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.draft_adapter: DraftAdapter | None = None
        self.fused: Backend | None = None  # of compiled functions; chosen before weights are final
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

    def logits(self, h_ND: Tensor, pending: Tensor | None = None) -> Tensor:
        return self.head.project(self.norm(h_ND, pending))

    @property
    def backend(self) -> Backend:
        """What runs the operations."""
        return self.fused or backend_for(self.dtype, self.device)

    @property
    def each_layer(self) -> Sequence[Layer]:
        return cast(Sequence[Layer], tuple(self.layers))

    @cached_property
    def packed_layers(self) -> Layers | None:
        """All layers, if the backend runs several in one call."""
        return self.backend.pack_layers(self)

    def __getstate__(self) -> dict[str, Any]:
        """Without the packed layers, which name places in memory: a copy makes its own."""
        return {name: value for name, value in self.__dict__.items() if name != "packed_layers"}

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
        """Freezes a section for inference, and packs its weights as the backend wants them."""
        self.__dict__.pop("packed_layers", None)  # made of the weights as they were
        for module in self.sections()[name]:
            module.requires_grad_(False)
        if name == "head":
            self.norm.backend = self.backend
            self.head.prepare(self.backend, weights=weights)
            self.embedding.prepare(self.dtype, tied=self.head if self.config.tied else None)
        elif name != "embedding":
            cast(Layer, self.sections()[name][0]).prepare(self.backend, weights)

    def prepare(self, weights: Weights = WEIGHTS) -> "Transformer":
        """Freezes all weights for inference."""
        for name in self.sections():
            self.prepare_section(name, weights)
        return self.eval()
