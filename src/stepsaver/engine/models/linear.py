"""Linear maps, as fast as the machine can.

On a CPU a plain `F.linear` of few rows runs at half the memory bandwidth; weights packed by oneDNN reach it
(docs/speed.md has the figures). Preparing copies the weights, so it is asked for when they are final, and slices of
stacked weights that are used alone are prepared alone. Without that this is an ordinary `nn.Linear`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Slice = tuple[int, int]  # rows of the weight, which are columns of the result

ROWS_HINT = 32  # the number of rows that packing is told to expect: a block
LARGE = 1 << 17  # weights below this many numbers stay in the processor's cache, where plain multiplication is faster


def _has_packing() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


# with its overload named, a call saves the search for it: 13 us between other work
_multiply_packed = torch.ops.mkldnn._linear_pointwise.default if _has_packing() else None


def can_pack(weight: Tensor) -> bool:
    """oneDNN packs float32 weights on the CPU; it pays for large ones."""
    return (
        _multiply_packed is not None
        and weight.numel() >= LARGE
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
    )


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


def _transposed(weight: Tensor) -> Tensor:
    """The same numbers, column behind column in memory: 3 to 10 % faster where weights are small."""
    return weight.t().contiguous().t()


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _multiply_packed is not None
    return _multiply_packed(x, packed, bias, "none", [], "")


class Linear(nn.Linear):
    """A linear map whose rows can be used in slices."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.whole: Slice = (0, outputs)
        self.prepared: dict[Slice, tuple[Tensor, Tensor | None]] = {}
        self.is_packed = False

    def prepare(self, *slices: Slice, scale: Tensor | None = None) -> None:
        """Copies the whole map and the given slices of it into the fastest layout. They must not change any more.

        `scale` multiplies the inputs, once and for all.
        """
        self.is_packed = can_pack(self.weight)
        scaled = self.weight.detach() if scale is None else self.weight.detach() * scale
        if scaled.numel() < LARGE:
            scaled = _transposed(scaled)
        for rows in (self.whole, *slices):
            weight, (_, bias) = scaled[slice(*rows)], self._rows(rows)
            self.prepared[rows] = (pack(weight) if self.is_packed else weight, bias)

    def project(self, x: Tensor, rows: Slice | None = None) -> Tensor:
        """The map's outputs, or those of some rows of its weight."""
        if self.prepared:
            weight, bias = self.prepared[rows or self.whole]
        else:
            weight, bias = (self.weight, self.bias) if rows is None else self._rows(rows)
        return multiply_packed(x, weight, bias) if self.is_packed else F.linear(x, weight, bias)

    def _rows(self, rows: Slice) -> tuple[Tensor, Tensor | None]:
        chosen = slice(*rows)
        return self.weight[chosen], None if self.bias is None else self.bias[chosen]
