"""Rotary position embedding: the rotation of every position, with the frequency scalings that checkpoints use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.fields import Field, Flag, Real, Whole, Word, read_fields

FACTOR = Real(0, 1e6)
KINDS = ("default", "linear", "llama3", "yarn")
SCALING_FIELDS: dict[str, Field] = {
    "rope_type": Word(),
    "type": Word(),
    "rope_theta": Real(0, 1e15),
    "factor": FACTOR,
    "low_freq_factor": FACTOR,
    "high_freq_factor": FACTOR,
    "original_max_position_embeddings": Whole(1, 1 << 27),
    "beta_fast": FACTOR,
    "beta_slow": FACTOR,
    "mscale": FACTOR,
    "mscale_all_dim": FACTOR,
    "attention_factor": FACTOR,
    "truncate": Flag(),
    "llama_4_scaling_beta": FACTOR,
}


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192
    fast_turns: float = 32.0  # YaRN: dimensions that turn so often within the original positions are left as they are
    slow_turns: float = 1.0  # and those that turn so seldom get the whole factor
    rounds_outwards: bool = True  # whether the range of dimensions between the two is rounded
    magnitude: float = 1.0  # what turned queries and keys are multiplied by
    query_growth: float = 0.0  # how queries grow with the logarithm of their position


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
    if kind not in KINDS:
        raise UsageError(f"rope scaling {shown(kind)} is not supported; known: {', '.join(KINDS)}")
    rope = Rope(theta=scaling.get("rope_theta", config.get("rope_theta", Rope.theta)), kind=kind)
    if (growth := scaling.get("llama_4_scaling_beta")) is not None:
        rope = replace(rope, query_growth=growth, original_positions=scaling["original_max_position_embeddings"])
    if kind == "linear":
        return replace(rope, factor=scaling["factor"])
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if not low < high:
            raise UsageError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return replace(
            rope,
            factor=scaling["factor"],
            low_frequency_factor=low,
            high_frequency_factor=high,
            original_positions=scaling["original_max_position_embeddings"],
        )
    return _yarn(rope, scaling, config["max_position_embeddings"]) if kind == "yarn" else rope


def _yarn(rope: Rope, scaling: Mapping[str, Any], positions: int) -> Rope:
    """YaRN (Peng et al., 2023), with the defaults of transformers."""
    original = scaling.get("original_max_position_embeddings", positions)
    factor = scaling.get("factor", positions / original)
    fast, slow = scaling.get("beta_fast", Rope.fast_turns), scaling.get("beta_slow", Rope.slow_turns)
    if not slow < fast:
        raise UsageError(f"beta_slow {slow} is not below beta_fast {fast}")
    if not rope.theta > 1:
        raise UsageError(f"rope_theta {rope.theta} is not above 1, as yarn needs it")

    def magnitude(scale: float) -> float:
        return 1 + 0.1 * scale * math.log(max(factor, 1.0))

    scale, scale_of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    usual = magnitude(1.0) if scale is None or scale_of_all is None else magnitude(scale) / magnitude(scale_of_all)
    return replace(
        rope,
        factor=factor,
        original_positions=original,
        fast_turns=fast,
        slow_turns=slow,
        rounds_outwards=scaling.get("truncate", True),
        magnitude=scaling.get("attention_factor", usual),
    )


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
    if rope.kind == "yarn":
        first, last = (_dimension_turning(turns, rope, head_dim) for turns in (rope.fast_turns, rope.slow_turns))
        if rope.rounds_outwards:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
        share = ((pairs - first) / (last - first or 0.001)).clamp(0, 1)
        return (1 - share) * angles + share * angles / rope.factor
    return angles


def _dimension_turning(turns: float, rope: Rope, head_dim: int) -> float:
    """The pair of dimensions that turns so often within the original positions; between two pairs, a fraction."""
    return head_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def rotation_table(rope: Rope, *, head_dim: int, positions: int, dtype: torch.dtype) -> Rotation:
    """The rotations of positions 0 to `positions` - 1. As in the reference, angles are computed in float32."""
    exact = dtype == torch.float64
    angle_dtype = torch.float64 if exact else torch.float32
    places = torch.arange(positions, dtype=angle_dtype, device="cpu")
    angles = torch.outer(places, frequencies(rope, head_dim).to(angle_dtype)).unsqueeze(1)
    cos, sin = angles.cos() * rope.magnitude, angles.sin() * rope.magnitude
    # the sine includes the sign of "rotate half", so that rotating needs no negation
    turns = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)
    if not rope.query_growth or positions <= rope.original_positions:  # all are 1
        return Rotation(turns)
    scale = 1 + rope.query_growth * (1 + (places / rope.original_positions).floor()).log()
    return Rotation(turns, scale.to(dtype))


def rotate(x_NHE: Tensor, rotation: Rotation, *, out: Tensor | None = None) -> Tensor:
    """Rotates each pair (i, i + head_dim / 2) by its angle. `out` may be the input itself."""
    cos, sin = rotation.turns.unbind(-3)
    return torch.addcmul(x_NHE * cos, x_NHE.roll(x_NHE.shape[-1] // 2, -1), sin, out=out)
