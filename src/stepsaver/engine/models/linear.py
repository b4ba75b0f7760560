"""Linear maps, as fast as the machine can, in as much memory as their numbers need.

On a CPU a plain `F.linear` of few rows runs at half the memory bandwidth, and reads four bytes for a number that most
checkpoints store in two. So when the weights are final they are laid out anew (`layouts.py`), once, and large ones are
not kept beside that. Without it this is an ordinary `nn.Linear`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine import kernels
from stepsaver.engine.defaults import KINDS_OF_WEIGHTS, WEIGHTS, Weights
from stepsaver.engine.errors import UsageError, unknown_name
from stepsaver.engine.models.layouts import Halves, Layout, Packed, Plain, Slice, can_pack, keep_halves

LARGE = 1 << 17  # weights below this many numbers stay in the processor's cache, where plain multiplication is faster


def halves_problem() -> str | None:
    """Why this machine keeps no weights in 16 bits; None: it does."""
    if kernels.problem is not None:
        return f"no kernels: {kernels.problem}"
    return None if kernels.multiplies_halves() else "the processor or the compiler lacks AVX2 and F16C"


def served_weights(weights: Weights, dtype: torch.dtype, device: torch.device) -> Weights:
    """What a choice amounts to here: float32 where nothing can be kept in 16 bits."""
    can_keep = dtype == torch.float32 and device.type == "cpu" and halves_problem() is None
    return weights if can_keep else "float32"


def check_weights(weights: str, dtype: torch.dtype, device: torch.device) -> None:
    """Whether a choice is known and can be had here."""
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
    of the first float16 rounds.
    """

    float16: int = 0
    full: int = 0
    rounded: int = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.float16 + other.float16, self.full + other.full, self.rounded + other.rounded)


def _transposed(weight: Tensor) -> Tensor:
    """The same numbers, column after column in memory: 3 to 10 % faster where weights are small."""
    return weight.t().contiguous().t()


class Linear(nn.Linear):
    """A linear map whose rows can be used in slices."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.whole: Slice = (0, outputs)
        self.layout: Layout | None = None

    def reset_parameters(self) -> None:
        """Draws no numbers on the meta device: to do so torch imports its compiler, which takes two seconds."""
        if not self.weight.is_meta:
            super().reset_parameters()

    @property
    def numbers(self) -> int:
        return self.in_features * self.out_features

    @property
    def kept(self) -> Kept:
        if isinstance(self.layout, Halves):
            return Kept(float16=self.numbers, rounded=self.layout.rounded)
        return Kept(full=self.numbers)

    def prepare(self, *slices: Slice, scale: Tensor | None = None, weights: Weights = WEIGHTS) -> bool:
        """Lays out the map, and slices that make it up, for the fastest multiplication. It must not change any more.

        `scale` should multiply the inputs. Returns whether the map does that from now on: 16 bits have no room for the
        product. A large float32 weight is then gone; what is stored in 16 bits is multiplied in float32.
        """
        assert self.weight is not None, "a map that is kept in another layout cannot be prepared again"
        stored = self.weight.detach()
        is_single = stored.dtype != torch.float64
        if is_single and weights != "float32" and (weights == "float16" or self.numbers >= LARGE):
            self.layout = self._as_halves(stored, slices, must=weights == "float16")
            if self.layout is not None:
                self.drop_weight()
                return scale is None
        weight = stored.float() if is_single else stored
        if scale is not None:
            weight = weight * scale
        if is_single and self.numbers >= LARGE:
            self.drop_weight()
            self.layout = (Packed if can_pack() else Plain)(weight, self.bias, slices)
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

    def drop_weight(self) -> None:
        self.register_parameter("weight", None)

    def project(self, x: Tensor, rows: Slice | None = None) -> Tensor:
        """The map's outputs, or those of some rows of its weight."""
        if self.layout is not None:
            return self.layout.project(x, rows or self.whole)
        if rows is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight[slice(*rows)], None if self.bias is None else self.bias[slice(*rows)])


class Embedding(nn.Embedding):
    """Rows by token, in the precision of the arithmetic; a large table stays in the precision that it is stored in."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__(vocab, hidden)
        self.arithmetic: torch.dtype | None = None  # None: that of the table
        self.tied: Halves | None = None  # the head that holds the same numbers, instead of a table

    def reset_parameters(self) -> None:
        """As of a linear map."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        if self.tied is not None:
            return self.tied.look_up(ids)
        rows = super().forward(ids)
        return rows if self.arithmetic is None else rows.to(self.arithmetic)

    def prepare(self, arithmetic: torch.dtype, *, tied: Linear | None) -> None:
        self.arithmetic = arithmetic
        if tied is not None and isinstance(tied.layout, Halves):
            self.tied = tied.layout
            self.register_parameter("weight", None)
