"""The network: pre-norm decoder layers whose parts return what they add to the residual stream.

A layer knows neither its index nor that caches or reuse exist. Attention is split where the keys and values leave it:
`project` gives queries, keys and values, somebody else mixes them, `finish` gives the delta. Shape letters, here and
everywhere: N packed rows (leading dimensions in training), D hidden, H query heads, K key-value heads, E head
dimension, F width of the MLP, V vocabulary, L rows of context.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.linear import Linear, Slice
from stepsaver.engine.models.rope import Rotation, rotate, rotation_table


class KeysValues(NamedTuple):
    keys: Tensor
    values: Tensor


class Projection(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor


class Norm(nn.Module):
    """Root-mean-square norm. Prepared for inference it is three operations instead of six.

    With n the length of a row of width w, x / sqrt(n^2 / w + eps) is sqrt(w) x / hypot(n, sqrt(w eps)): the factor
    sqrt(w) goes into the weights, and those into the packed map behind, where there is one.
    """

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps
        self.floor: Tensor | None = None  # sqrt(w eps), once prepared
        self.gain: Tensor | None = None  # sqrt(w) times the weights; None: they are part of the map behind

    def scale(self, h_ND: Tensor) -> Tensor:
        if self.floor is None:
            return F.rms_norm(h_ND, (h_ND.shape[-1],), self.weight, self.eps)
        lengths = torch.linalg.vector_norm(h_ND, dim=-1, keepdim=True)
        scaled = h_ND / torch.hypot(lengths, self.floor, out=lengths)
        return scaled if self.gain is None else scaled.mul_(self.gain)

    def fold_into(self, linear: Linear, *slices: Slice) -> None:
        """Prepares the norm, unless it is of half precision, and packs the map behind it with its weights in it."""
        if self.weight.dtype not in (torch.float32, torch.float64):
            linear.pack(*slices)
            return
        width = self.weight.shape[0]
        gain = self.weight.detach() * width**0.5
        self.floor = torch.tensor((width * self.eps) ** 0.5, dtype=self.weight.dtype, device=self.weight.device)
        self.gain = None if linear.pack(*slices, scale=gain) else gain


class Attention(nn.Module):
    """The attention part with its norm. One fused weight holds queries, keys and values, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.query_width = config.heads * config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.query_rows = (0, self.query_width)
        self.kv_rows = (self.query_width, self.query_width + 2 * kv_width)
        self.norm = Norm(config.hidden, config.norm_eps)
        self.qkv = Linear(config.hidden, self.query_width + 2 * kv_width, bias=config.qkv_bias)
        self.output = Linear(self.query_width, config.hidden, bias=config.output_bias)

    def project(self, h_ND: Tensor, rotation: Rotation) -> Projection:
        fused = self._heads(self.qkv.project(self.norm.scale(h_ND)))
        rotated = rotate(fused[..., : self.heads + self.kv_heads, :], rotation)
        return Projection(
            rotated[..., : self.heads, :], rotated[..., self.heads :, :], fused[..., self.heads + self.kv_heads :, :]
        )

    def project_queries(self, h_ND: Tensor, rotation: Rotation) -> Tensor:
        return rotate(self._heads(self.qkv.project(self.norm.scale(h_ND), self.query_rows)), rotation)

    def project_keys_values(self, h_ND: Tensor, rotation: Rotation) -> KeysValues:
        fused = self._heads(self.qkv.project(self.norm.scale(h_ND), self.kv_rows))
        return KeysValues(rotate(fused[..., : self.kv_heads, :], rotation), fused[..., self.kv_heads :, :])

    def finish(self, mixed_NHE: Tensor) -> Tensor:
        return self.output.project(mixed_NHE.flatten(-2))

    def pack(self) -> None:
        self.norm.fold_into(self.qkv, self.query_rows, self.kv_rows)
        self.output.pack()

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class Mlp(nn.Module):
    """The MLP part with its norm; one fused weight holds gate and up, in this order."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden, config.norm_eps)
        self.gate_up = Linear(config.hidden, 2 * config.mlp, bias=config.mlp_bias)
        self.down = Linear(config.mlp, config.hidden, bias=config.mlp_bias)

    def forward(self, h_ND: Tensor) -> Tensor:
        gate, up = self.gate_up.project(self.norm.scale(h_ND)).chunk(2, -1)
        active = F.silu(gate) * up if torch.is_grad_enabled() else F.silu(gate, inplace=True).mul_(up)
        return self.down.project(active)

    def pack(self) -> None:
        self.norm.fold_into(self.gate_up)
        self.down.pack()


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = Mlp(config)


class Transformer(nn.Module):
    """Embedding, layers, final norm and head. Its parts are called by `forward.run_step` and by the training."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = Norm(config.hidden, config.norm_eps)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def rotations(self, positions: int) -> Rotation:
        """The rotation table of the first `positions` positions, on the model's device."""
        config = self.config
        table = rotation_table(config.rope, head_dim=config.head_dim, positions=positions, dtype=self.dtype)
        return Rotation(table.cos.to(self.device), table.sin.to(self.device))

    def logits(self, h_ND: Tensor) -> Tensor:
        return self.head.project(self.norm.scale(h_ND))

    def prepare(self) -> "Transformer":
        """Freezes the weights for inference and packs them where the machine has a faster layout."""
        self.requires_grad_(False)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.attention.pack()
            layer.mlp.pack()
        self.norm.fold_into(self.head)
        return self.eval()
