"""What lies between the matrix multiplications of a layer, and the multiplication by weights in blocks: one call each.

In float32. N packed rows, D hidden, H query heads, K key-value heads, E head dimension, V vocabulary.
"""

from ctypes import byref, c_double
from typing import NamedTuple

import torch
from torch import Tensor

from stepsaver.engine.backends.cpu.library import (
    BLOCK,
    KINDS,
    LONGEST_CONTEXT,
    LONGEST_HEAD,
    AttendCall,
    MultiplyCall,
    has_run,
    library,
)
from stepsaver.engine.backends.packed import Attending
from stepsaver.engine.models.rope import Rotation


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def rms_norm(h_ND: Tensor, norm_weight: Tensor, eps: float, pending: Tensor | None = None) -> Tensor:
    width = h_ND.shape[-1]
    assert h_ND.dtype == norm_weight.dtype == torch.float32
    assert h_ND.is_contiguous()
    assert norm_weight.shape == (width,)
    assert norm_weight.is_contiguous()
    assert pending is None or (pending.dtype == h_ND.dtype and pending.is_contiguous() and pending.shape == h_ND.shape)
    out = torch.empty_like(h_ND)
    library().stepsaver_rms_norm(
        h_ND.data_ptr(), address(pending), norm_weight.data_ptr(), out.data_ptr(), h_ND.numel() // width, width, eps
    )
    return out


def silu_product(gate_up: Tensor) -> Tensor:
    assert gate_up.dtype == torch.float32
    assert gate_up.is_contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    library().stepsaver_silu_product(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def copy_rows(x_ND: Tensor, stored: Tensor, indices: Tensor) -> None:
    assert x_ND.dtype == stored.dtype == torch.float32
    assert x_ND.is_contiguous()
    assert stored.is_contiguous()
    assert indices.dtype == torch.int64
    assert indices.is_contiguous()
    rows, width = x_ND.shape
    assert indices.shape == (rows,)
    assert stored.shape[1:] == (width,)
    has_run(
        library().stepsaver_copy_rows(
            x_ND.data_ptr(), stored.data_ptr(), indices.data_ptr(), rows, width, stored.shape[0]
        )
    )


def argmax(logits_NV: Tensor, mask_id: int) -> Tensor:
    logits_NV = logits_NV.contiguous()
    assert logits_NV.dtype == torch.float32
    rows, width = logits_NV.shape
    out = logits_NV.new_empty((3, rows), dtype=torch.float64)
    has_run(library().stepsaver_argmax(logits_NV.data_ptr(), out.data_ptr(), rows, width, mask_id))
    return out


class Change(NamedTuple):
    """What float16 changes in some numbers."""

    rounded: int
    is_worse: bool  # one of them is not finite, or 2^-17 or larger and rounded
    squared_error: float
    squared_size: float  # not known of halves, which nothing changes


def pack_weight(rows: Tensor, blocks: Tensor) -> Change:
    """Puts the rows of a weight into the first of these blocks, as the halves that are nearest to their numbers."""
    assert rows.is_contiguous()
    assert blocks.is_contiguous()
    assert blocks.dtype == torch.float16
    count, inputs = rows.shape
    assert blocks.shape[1:] == (inputs, BLOCK)
    assert blocks.shape[0] * BLOCK >= count
    found = (c_double * 4)()
    library().stepsaver_pack_weight(rows.data_ptr(), KINDS[rows.dtype], blocks.data_ptr(), count, inputs, found)
    return Change(int(found[0]), bool(found[1]), found[2], found[3])


def multiply(x_ND: Tensor, blocks: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fills `out`, which may be columns of a wider tensor, with the rows times a weight in half or single precision.

    The weight lies in [blocks, inputs, BLOCK]: outputs side by side, zeros after the last one.
    """
    rows, inputs = x_ND.shape
    outputs = out.shape[1]
    assert x_ND.dtype == out.dtype == torch.float32
    assert blocks.dtype in (torch.float16, torch.float32)
    assert x_ND.stride(1) == 1 or inputs == 1
    assert out.stride(1) == 1 or outputs == 1
    assert out.shape[0] == rows
    assert blocks.is_contiguous()
    assert blocks.shape == ((outputs + BLOCK - 1) // BLOCK, inputs, BLOCK)
    assert bias is None or (bias.dtype == torch.float32 and bias.shape == (outputs,) and bias.is_contiguous())
    given = MultiplyCall(
        x_ND.data_ptr(),
        blocks.data_ptr(),
        address(bias),
        out.data_ptr(),
        KINDS[blocks.dtype],
        rows,
        inputs,
        outputs,
        x_ND.stride(0),
        out.stride(0),
    )
    library().stepsaver_multiply(byref(given))


def can_attend(head_dim: int, length: int) -> bool:
    """Whether heads are of a width, and a context of a length, that the attention kernel is made for."""
    return head_dim % 8 == 0 and head_dim <= LONGEST_HEAD and length <= LONGEST_CONTEXT


class Norms(NamedTuple):
    """Of each head's queries and keys: a factor per column of the former, then of the latter."""

    weight: Tensor  # [2 E]
    eps: float


def attend(
    projected: Tensor,
    rotation: Rotation,
    stored: Tensor,
    places: Tensor | None,
    attending: Attending | None,
    norms: Norms | None = None,
) -> Tensor | None:
    """Norms and rotates packed rows in place, stores keys and values in a layer's [slots, 2 K, capacity, E], attends.

    A row holds its queries, and after them its keys and values if there are `places` [N, 2] for them: slot and
    position. Returns the mixed queries [N, H E]; of those that no segment of `attending` has, whatever happened
    to be in memory.
    """
    slots, kv_rows, capacity, head_dim = stored.shape
    rows, width = projected.shape
    heads = width // head_dim - (0 if places is None else kv_rows)
    check_rotation(rotation, rows, head_dim)
    assert projected.dtype == stored.dtype == torch.float32
    assert projected.is_contiguous()
    assert stored.is_contiguous()
    assert places is None or (places.dtype == torch.int64 and places.shape == (rows, 2) and places.is_contiguous())
    assert norms is None or (norms.weight.dtype == torch.float32 and norms.weight.shape == (2 * head_dim,))
    out = None if attending is None or attending.segments is None else projected.new_empty((rows, heads * head_dim))
    given = AttendCall(
        projected.data_ptr(),
        address(out),
        stored.data_ptr(),
        rotation.turns.data_ptr(),
        address(rotation.query_scale),
        address(places),
        *segment_fields(attending, rows),
        rows,
        heads,
        kv_rows // 2,
        head_dim,
        slots,
        capacity,
        None if norms is None else norms.weight.data_ptr(),
        0.0 if norms is None else norms.eps,
    )
    if not has_run(library().stepsaver_attend(byref(given))):
        raise MemoryError
    return out


def segment_fields(attending: Attending | None, rows: int) -> tuple[int | None, int | None, int]:
    """Where the segments and views of `rows` queries are in memory, and how many segments there are."""
    if attending is None or attending.segments is None:
        return None, None, 0
    segments, views = attending.segments, attending.views
    assert views is not None
    assert segments.dtype == views.dtype == torch.int64
    assert segments.shape[1] == 3
    assert views.shape == (rows, 3)
    assert segments.is_contiguous()
    assert views.is_contiguous()
    return segments.data_ptr(), views.data_ptr(), len(segments)


def check_rotation(rotation: Rotation, rows: int, head_dim: int) -> None:
    turns, scale = rotation.turns, rotation.query_scale
    assert turns.dtype == torch.float32
    assert turns.is_contiguous()
    assert turns.numel() == rows * 2 * head_dim
    assert scale is None or (scale.dtype == torch.float32 and scale.shape == (rows,) and scale.is_contiguous())
