"""Linear maps. Final weights are brought into the fastest layout that the backend has, once, and the originals of large
ones are dropped. Before that, these are torch's own modules.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepsaver.engine.backends import Backend
from stepsaver.engine.backends.backend import Slice, Weight
from stepsaver.engine.defaults import Weights

LARGE = 1 << 17  # weights with fewer numbers stay in the processor's caches


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


class Linear(nn.Linear):
    """A linear map that can also be applied in slices of its rows."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.packed: Weight | None = None  # the weight in a backend's layout

    def reset_parameters(self) -> None:
        """Draws no numbers on the meta device: torch would import its compiler for it, which takes two seconds."""
        if not self.weight.is_meta:
            super().reset_parameters()

    @property
    def numbers(self) -> int:
        return self.in_features * self.out_features

    @property
    def is_large(self) -> bool:
        return self.numbers >= LARGE

    @property
    def kept(self) -> Kept:
        halves = 0 if self.packed is None else self.packed.halves
        return Kept(halves, self.numbers - halves, 0 if self.packed is None else self.packed.rounded)

    def prepare(self, backend: Backend, *slices: Slice, weights: Weights) -> None:
        """Packs the weight, for products with it and with the slices that make it up. It must not change after that."""
        assert self.weight is not None, "a map that is kept in another layout cannot be prepared again"
        self.packed = backend.pack_weight(self.weight.detach(), self.bias, slices, weights, is_large=self.is_large)
        if self.packed is not None and self.is_large:
            self.register_parameter("weight", None)

    def project(self, x: Tensor, rows: Slice | None = None) -> Tensor:
        """All outputs of the map, or only those of some rows of its weight."""
        if self.packed is not None:
            return self.packed.project(x, rows or (0, self.out_features))
        if rows is None:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight[slice(*rows)], None if self.bias is None else self.bias[slice(*rows)])


class Embedding(nn.Embedding):
    """Rows by token, in the precision of the arithmetic. A large table stays in the precision of the checkpoint."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__(vocab, hidden)
        self.arithmetic: torch.dtype | None = None  # None: the table's precision
        self.tied: Weight | None = None  # the head's weight with the same numbers, which replaces the table

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
        if tied is not None and tied.weight is None and tied.packed is not None and tied.packed.halves:
            self.tied = tied.packed
            self.register_parameter("weight", None)
