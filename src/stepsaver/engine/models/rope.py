"""Rotary position embedding: the rotation of every position, with the frequency scalings that checkpoints use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.fields import Field, Real, Whole, Word, read_fields

FACTOR = Real(0, 1e6)
SCALING_FIELDS: dict[str, Field] = {
    "rope_type": Word(),
    "type": Word(),
    "rope_theta": Real(0, 1e15),
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "original_max_position_embeddings": Whole(1, 1 << 27),
}


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class Rotation:
    """How the queries and keys of some positions are turned."""

    turns: Tensor  # [positions, 2, 1, head_dim]: cosines and signed sines
    query_scale: Tensor | None = None  # [positions]: what turned queries are multiplied by

    def __getitem__(self, positions: Tensor) -> "Rotation":
        return Rotation(self.turns[positions], None if self.query_scale is None else self.query_scale[positions])

    def to(self, device: torch.device) -> "Rotation":
        return Rotation(self.turns.to(device), None if self.query_scale is None else self.query_scale.to(device))


def parse_rope(config: Mapping[str, Any]) -> Rope:
    """Reads `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    scaling = read_fields(config.get("rope_parameters") or config.get("rope_scaling") or {}, SCALING_FIELDS)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = scaling.get("rope_theta", config.get("rope_theta", Rope.theta))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=scaling["factor"])
    if kind == "llama3":
        rope = Rope(
            theta=theta,
            kind=kind,
            factor=scaling["factor"],
            low_frequency_factor=scaling["low_freq_factor"],
            high_frequency_factor=scaling["high_freq_factor"],
            original_positions=scaling["original_max_position_embeddings"],
        )
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        if not low < high:
            raise UsageError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return rope
    raise UsageError(f"rope scaling {shown(kind)} is not supported; known: default, linear, llama3")


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each pair of dimensions, in float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim
    angles = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return angles / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / angles
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        share = ((rope.original_positions / wavelengths - low) / (high - low)).clamp(0, 1)
        return share * angles + (1 - share) * angles / rope.factor
    return angles


def rotation_table(rope: Rope, *, head_dim: int, positions: int, dtype: torch.dtype) -> Rotation:
    """The rotations of positions 0 to `positions` - 1. As in the reference, angles are computed in float32."""
    exact = dtype == torch.float64
    angle_dtype = torch.float64 if exact else torch.float32
    angles = torch.outer(
        torch.arange(positions, dtype=angle_dtype, device="cpu"), frequencies(rope, head_dim).to(angle_dtype)
    ).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    # the sine includes the sign of "rotate half", so that rotating needs no negation
    return Rotation(torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype))


def rotate(x_NHE: Tensor, rotation: Rotation, *, out: Tensor | None = None) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) by its angle. `out` may be the input itself."""
    cos, sin = rotation.turns.unbind(-3)
    return torch.addcmul(x_NHE * cos, x_NHE.roll(x_NHE.shape[-1] // 2, -1), sin, out=out)
