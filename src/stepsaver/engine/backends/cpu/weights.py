"""Weights in memory, and how rows are multiplied by them. Each weight is kept once, in one layout.

A plain `F.linear` of few rows runs at half the memory bandwidth, and reads four bytes for a number that most
checkpoints store in two. `Halves` keeps numbers in 16 bits where float16 holds them, and multiplies in float32
arithmetic with our own kernel. Of other weights, `Packed` is oneDNN's layout of large ones, and `Floats` has small ones
in the same blocks as `Halves`. `Plain` is torch's, where there is none of these.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.backends.backend import Slice, Weight
from stepsaver.engine.backends.cpu import kernels, library
from stepsaver.engine.backends.cpu.layers import Map
from stepsaver.engine.backends.cpu.library import BLOCK
from stepsaver.engine.backends.cpu.result_memory import take_result
from stepsaver.engine.backends.cpu.weight_memory import give_back, take_halves
from stepsaver.engine.defaults import KINDS_OF_WEIGHTS, Weights
from stepsaver.engine.errors import UsageError, unknown_name

ROWS_HINT = 32  # oneDNN's packing is told to expect this many rows: a block
NEGLIGIBLE = 2.0**-19  # of a weight's size: a thousandth of bfloat16's own rounding


def halves_problem() -> str | None:
    """Why this machine cannot keep weights in 16 bits; None if it can."""
    if library.problem is not None:
        return f"no kernels: {library.problem}"
    return None if library.multiplies_blocks() else "the processor or the compiler lacks AVX2 and F16C"


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


def pack_weight(
    weight: Tensor, bias: Tensor | None, slices: Sequence[Slice], choice: Weights, *, is_large: bool
) -> Weight:
    """A weight in the fastest layout. What was stored in 16 bits, and is not kept so, is widened first."""
    if choice != "float32":
        halves = keep_halves(weight, bias, slices) if halves_problem() is None else None
        if halves is not None:
            return halves
        if choice == "float16":
            raise UsageError(
                f"weights float16: float16 does not hold the numbers of a weight of {weight.shape[0]} x "
                f"{weight.shape[1]}; auto keeps such ones in float32"
            )
    weight = weight.float()
    if is_large and can_pack():
        return Packed(weight, bias)
    return Floats(weight, bias, slices) if library.multiplies_blocks() and not is_large else Plain(weight, bias)


def _has_packing() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


# naming the overload saves the search for it: 13 us per call between other work
_multiply_packed = torch.ops.mkldnn._linear_pointwise.default if _has_packing() else None


def can_pack() -> bool:
    """Whether oneDNN can pack weights on this machine."""
    return _multiply_packed is not None


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)


def multiply_packed(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _multiply_packed is not None
    return _multiply_packed(x, packed, bias, "none", [], "")


def _of(bias: Tensor | None, rows: Slice) -> Tensor | None:
    return None if bias is None else bias.detach()[slice(*rows)]


class Plain(Weight):
    """A weight in torch's usual layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def project(self, x: Tensor, rows: Slice) -> Tensor:
        return F.linear(x, self.weight[slice(*rows)], _of(self.bias, rows))


class Packed(Weight):
    """A float32 weight in oneDNN's layout. It cannot be sliced, so the product of the whole weight is sliced instead.

    Packing slices separately would take a second copy, or two calls when all rows are needed, as in almost every layer.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.whole = (0, weight.shape[0])
        self.packed, self.bias = pack(weight), bias

    def project(self, x: Tensor, rows: Slice) -> Tensor:
        product = multiply_packed(x, self.packed, self.bias)
        return product if rows == self.whole else product[:, slice(*rows)].contiguous()


class Piece(NamedTuple):
    blocks: Tensor
    bias: Tensor | None
    columns: slice  # of the result


class Blocks(Weight):
    """A weight in [blocks, inputs, BLOCK], multiplied by our own kernel. Every slice begins a new block."""

    def __init__(self, blocks: Tensor, bias: Tensor | None, borders: Sequence[int]) -> None:
        self.blocks = blocks
        self.by_rows: dict[Slice, tuple[Piece, ...]] = {}
        starts = dict(zip(borders, _first_blocks(borders), strict=True))
        pieces = []
        for start, stop in pairwise(borders):
            piece = Piece(blocks[starts[start] : starts[stop]], _of(bias, (start, stop)), slice(start, stop))
            self.by_rows[start, stop] = (piece._replace(columns=slice(0, stop - start)),)
            pieces.append(piece)
        if all(border % BLOCK == 0 for border in borders[1:-1]):  # the usual case: one call for all of them
            pieces = [Piece(blocks, bias, slice(0, borders[-1]))]
        self.by_rows[0, borders[-1]] = tuple(pieces)
        # the whole weight, if its blocks follow one another
        self.map = Map(blocks, _of(bias, (0, borders[-1]))) if len(pieces) == 1 else None

    def project(self, x: Tensor, rows: Slice) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = take_result(flat.shape[0], rows[1] - rows[0])
        pieces = self.by_rows[rows]
        if len(pieces) == 1:
            kernels.multiply(flat, pieces[0].blocks, pieces[0].bias, out)
        else:
            for blocks, bias, columns in pieces:
                kernels.multiply(flat, blocks, bias, out[:, columns])
        return out.view(*x.shape[:-1], out.shape[1])


class Floats(Blocks):
    """A float32 weight in blocks. For small weights, which stay in the processor's caches."""

    def __init__(self, weight: Tensor, bias: Tensor | None, slices: Sequence[Slice]) -> None:
        borders = _borders(weight, slices)
        firsts = _first_blocks(borders)
        rows = weight.new_zeros(firsts[-1] * BLOCK, weight.shape[1])
        for (start, stop), first in zip(pairwise(borders), firsts, strict=False):
            rows[first * BLOCK :][: stop - start] = weight[start:stop]
        blocks = rows.view(firsts[-1], BLOCK, -1).transpose(1, 2).contiguous()
        super().__init__(blocks, bias, borders)


class Halves(Blocks):
    """A weight in 16 bits."""

    def __init__(self, blocks: Tensor, bias: Tensor | None, borders: Sequence[int], rounded: int) -> None:
        super().__init__(blocks, bias, borders)
        self.halves, self.rounded = borders[-1] * blocks.shape[1], rounded

    def look_up(self, rows: Tensor) -> Tensor:
        """Some rows of the weight, in float32, as an embedding returns them."""
        assert len(self.by_rows) == 1, "slices may have blocks of their own"
        return self.blocks[rows // BLOCK, :, rows % BLOCK].float()


def _borders(weight: Tensor, slices: Sequence[Slice]) -> list[int]:
    """Where slices that make up a weight begin, and its end."""
    borders = [0, *(stop for _, stop in slices or ((0, weight.shape[0]),))]
    assert borders[-1] == weight.shape[0], "slices follow one another and are the whole"
    return borders


def _first_blocks(borders: Sequence[int]) -> list[int]:
    """The first block of each slice between the borders, and at the end the number of blocks."""
    firsts = [0]
    for start, stop in pairwise(borders):
        firsts.append(firsts[-1] + (stop - start + BLOCK - 1) // BLOCK)
    return firsts


def keep_halves(weight: Tensor, bias: Tensor | None, slices: Sequence[Slice]) -> Halves | None:
    """The weight in 16 bits, if float16 holds it: all numbers exactly, except those below 8e-6 of a bfloat16 weight.

    Those may be off by 3e-8 if the total error is negligible. None: float16 does not hold the weight.
    """
    borders = _borders(weight, slices)
    firsts = _first_blocks(borders)
    blocks = take_halves(firsts[-1], weight.shape[1], BLOCK)
    rounded, error, size = 0, 0.0, 0.0
    for rows, (first, last) in zip(pairwise(borders), pairwise(firsts), strict=True):
        blocks[last - 1].zero_()  # rows may not fill it
        change = kernels.pack_weight(weight[slice(*rows)], blocks[first:last])
        if change.is_worse:
            give_back(blocks)
            return None
        rounded, error, size = rounded + change.rounded, error + change.squared_error, size + change.squared_size
    if error > NEGLIGIBLE**2 * size:
        give_back(blocks)
        return None
    return Halves(blocks, bias, borders, rounded)
