"""Linear maps that are as fast as the machine allows and take no more memory than their numbers need.

On a CPU, a plain `F.linear` of few rows runs at half the memory bandwidth, and reads four bytes for a number that most
checkpoints store in two. So final weights are brought into another layout once (`layouts.py`), and the originals of
large ones are dropped. Before that, this is an ordinary `nn.Linear`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine.backends.cpu import kernels
from stepsaver.engine.backends.cpu.layers import Map
from stepsaver.engine.backends.cpu.layouts import (
    Blocks,
    Floats,
    Halves,
    Layout,
    Packed,
    Plain,
    Slice,
    can_pack,
    keep_halves,
)
from stepsaver.engine.defaults import KINDS_OF_WEIGHTS, WEIGHTS, Weights
from stepsaver.engine.errors import UsageError, unknown_name

LARGE = 1 << 17  # weights with fewer numbers stay in the processor's caches


def halves_problem() -> str | None:
    """Why this machine cannot keep weights in 16 bits; None if it can."""
    if kernels.problem is not None:
        return f"no kernels: {kernels.problem}"
    return None if kernels.multiplies_blocks() else "the processor or the compiler lacks AVX2 and F16C"


def served_weights(weights: Weights, dtype: torch.dtype, device: torch.device) -> Weights:
    """What a choice means here: float32 if nothing can be kept in 16 bits."""
    can_keep = dtype == torch.float32 and device.type == "cpu" and halves_problem() is None
    return weights if can_keep else "float32"


def check_weights(weights: str, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses a choice that is unknown or not possible here."""
    if weights not in KINDS_OF_WEIGHTS:
        raise unknown_name("kind of weights", weights, KINDS_OF_WEIGHTS)
    if weights != "float16":
        return
    if dtype != torch.float32 or device.type != "cpu":
        raise UsageError(f"weights float16 are for float32 arithmetic on a CPU, not for {dtype} on {device}; use auto")
    problem = halves_problem()
    if problem is not None:
        raise UsageError(f"weights float16 are not available here ({problem}); use auto")


@dataclass(frozen=True)
class Kept:
    """How many numbers of a model's maps are kept in 16 bits, how many in the precision of the arithmetic, and how many
    of those in 16 bits are rounded.
    """

    float16: int = 0
    full: int = 0
    rounded: int = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.float16 + other.float16, self.full + other.full, self.rounded + other.rounded)


def _transposed(weight: Tensor) -> Tensor:
    """The same numbers, stored column by column: 3 to 10 % faster if weights are small."""
    return weight.t().contiguous().t()


class Linear(nn.Linear):
    """A linear map that can also be applied in slices of its rows."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.whole: Slice = (0, outputs)
        self.layout: Layout | None = None

    def reset_parameters(self) -> None:
        """Draws no numbers on the meta device: torch would import its compiler for it, which takes two seconds."""
        if not self.weight.is_meta:
            super().reset_parameters()

    @property
    def numbers(self) -> int:
        return self.in_features * self.out_features

    @property
    def map(self) -> Map | None:
        """The whole map, for the kernel that runs whole layers. None if its weight is not in blocks."""
        return self.layout.map if isinstance(self.layout, Blocks) else None

    @property
    def kept(self) -> Kept:
        if isinstance(self.layout, Halves):
            return Kept(float16=self.numbers, rounded=self.layout.rounded)
        return Kept(full=self.numbers)

    def prepare(self, *slices: Slice, scale: Tensor | None = None, weights: Weights = WEIGHTS) -> bool:
        """Brings the map, and the slices that make it up, into the fastest layout. The map must not change after that.

        The inputs are to be multiplied by `scale`. Returns whether the map does that from now on: a weight in 16 bits
        does not, as it has no room for the product. A large weight is dropped. 16 bits are multiplied in float32.
        """
        assert self.weight is not None, "a map that is kept in another layout cannot be prepared again"
        stored = self.weight.detach()
        is_single = stored.dtype != torch.float64
        if is_single and weights != "float32":
            self.layout = self._as_halves(stored, slices, must=weights == "float16")
            if self.layout is not None:
                self._drop_large_weight()
                return scale is None
        weight = stored.float() if is_single else stored
        if scale is not None:
            weight = weight * scale
        if is_single and self.numbers >= LARGE:
            self._drop_large_weight()
            self.layout = (Packed if can_pack() else Plain)(weight, self.bias, slices)
        elif is_single and kernels.multiplies_blocks():
            self.layout = Floats(weight, self.bias, slices)
        else:
            self.layout = Plain(_transposed(weight) if self.numbers < LARGE else weight, self.bias, slices)
        return True

    def _as_halves(self, stored: Tensor, slices: tuple[Slice, ...], *, must: bool) -> Halves | None:
        kept = keep_halves(stored, self.bias, slices) if halves_problem() is None else None
        if kept is None and must:
            raise UsageError(
                f"weights float16: float16 does not hold the numbers of a weight of {self.out_features} x "
                f"{self.in_features}; auto keeps such ones in float32"
            )
        return kept

    def _drop_large_weight(self) -> None:
        if self.numbers >= LARGE:
            self.register_parameter("weight", None)

    def project(self, x: Tensor, rows: Slice | None = None) -> Tensor:
        """All outputs of the map, or only those of some rows of its weight."""
        if self.layout is not None:
            return self.layout.project(x, rows or self.whole)
        if rows is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight[slice(*rows)], None if self.bias is None else self.bias[slice(*rows)])


class Embedding(nn.Embedding):
    """Rows by token, in the precision of the arithmetic. A large table stays in the precision of the checkpoint."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__(vocab, hidden)
        self.arithmetic: torch.dtype | None = None  # None: the table's precision
        self.tied: Halves | None = None  # the head with the same numbers, which replaces the table

    def reset_parameters(self) -> None:
        """Draws no numbers on the meta device, as in `Linear`."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        if self.tied is not None:
            return self.tied.look_up(ids)
        rows = super().forward(ids)
        return rows if self.arithmetic is None else rows.to(self.arithmetic)

    def prepare(self, arithmetic: torch.dtype, *, tied: Linear | None) -> None:
        self.arithmetic = arithmetic
        if tied is not None and tied.weight is None and isinstance(tied.layout, Halves):
            self.tied = tied.layout
            self.register_parameter("weight", None)
