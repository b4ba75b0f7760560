"""Linear maps, as fast as the machine can.

On a CPU a plain `F.linear` of few rows runs at half the memory bandwidth; weights packed by oneDNN reach it
(docs/speed.md has the figures). Packing copies the weights, so it is asked for when they are final, and slices of
stacked weights that are used alone are packed alone. Without packing this is an ordinary `nn.Linear`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Slice = tuple[int, int]  # rows of the weight, which are columns of the result

ROWS_HINT = 32  # the number of rows that packing is told to expect: a block
LARGE = 1 << 17  # weights below this many numbers stay in the processor's cache, where plain multiplication is faster


def can_pack(weight: Tensor) -> bool:
    """oneDNN packs float32 weights on the CPU; it pays for large ones."""
    return (
        weight.numel() >= LARGE
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


class Linear(nn.Linear):
    """A linear map whose rows can be used in slices."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.packed: dict[Slice, tuple[Tensor, Tensor | None]] = {}

    def pack(self, *slices: Slice, scale: Tensor | None = None) -> bool:
        """Packs the whole map and the given slices of it, if that pays, and says whether it did.

        The weights must not change any more. `scale` multiplies the inputs, once and for all.
        """
        if not can_pack(self.weight):
            return False
        for rows in ((0, self.out_features), *slices):
            weight, bias = self._rows(rows)
            scaled = weight.detach() if scale is None else weight.detach() * scale.detach()
            self.packed[rows] = (torch.ops.mkldnn._reorder_linear_weight(scaled, ROWS_HINT), bias)
        return True

    def project(self, x: Tensor, rows: Slice | None = None) -> Tensor:
        """The map's outputs, or those of some rows of its weight."""
        if self.packed:
            packed, bias = self.packed[rows or (0, self.out_features)]
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return F.linear(x, *((self.weight, self.bias) if rows is None else self._rows(rows)))

    def _rows(self, rows: Slice) -> tuple[Tensor, Tensor | None]:
        chosen = slice(*rows)
        return self.weight[chosen], None if self.bias is None else self.bias[chosen]
