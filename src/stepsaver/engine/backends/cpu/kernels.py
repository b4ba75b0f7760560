"""The few operations of our own, on a CPU in float32: what lies between the matrix multiplications of a layer, and the
multiplication of rows by weights that are kept in half precision.

The C beside this is compiled when the package is installed, if there is a compiler. Without it, in other precisions and
on a GPU the same is done by torch's operations, right beside the calls of these; with `STEPSAVER_KERNELS=0` everywhere.
With `STEPSAVER_KERNELS=plain` the kernels use no instructions that only some processors have, with `avx2` none beyond.
"""

import ctypes
import hashlib
import os
from ctypes import c_float, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import torch  # before the kernels, which then share its threads if it uses the same OpenMP
from torch import Tensor

SIGNATURES = {
    "stepsaver_scale_rows": (*[c_void_p] * 4, c_long, c_long, c_float),
    "stepsaver_lay_out": (c_void_p, c_long, c_void_p, c_long, c_long, c_void_p),
    "stepsaver_multiply": (*[c_void_p] * 2, c_long, *[c_void_p] * 2, *[c_long] * 5),
    "stepsaver_silu_product": (c_void_p, c_void_p, c_long, c_long),
    "stepsaver_copy_rows": (*[c_void_p] * 3, *[c_long] * 2),
    "stepsaver_mix": (*[c_void_p] * 7, *[c_long] * 6, c_float),
    "stepsaver_run_layers": (*[c_void_p] * 11, *[c_long] * 5, c_float, c_float),
    "stepsaver_run_reused_layers": (*[c_void_p] * 10, *[c_long] * 3, c_float, c_float),
    "stepsaver_most_likely": (c_void_p, c_void_p, c_long, c_long, c_long),
}

KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # of numbers, as the C names them
BLOCK = 32  # outputs that lie side by side in a weight
FOLDER = Path(__file__).parent
SOURCES = (
    "kernels.c",
    "rows.h",
    "multiply.c",
    "multiply_rows.h",
    "layers.c",
    "reused_layers.c",
    "layer.h",
    "parts.h",
    "tiles.c",
)
WITHOUT_TILES = "AVX512_CORE_FP16"  # the most that oneDNN knows below them


class Unusable(Exception):
    """Why there are no kernels, in a few words."""


def _load() -> ctypes.CDLL:
    if os.environ.get("STEPSAVER_KERNELS") == "0":
        raise Unusable("switched off by STEPSAVER_KERNELS")
    built = [FOLDER / f"_kernels{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in built if path.exists()), None)
    if path is None:
        raise Unusable("not built: no compiler when the package was installed")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unusable(f"built, but not to be loaded here: {error}") from None
    if _built_from(library) != source_hash():
        raise Unusable("built from another source than the one here; `make setup` builds them again")
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.stepsaver_multiplies_blocks.restype = c_long
    library.stepsaver_run_layers.restype = c_long
    library.stepsaver_run_reused_layers.restype = c_long
    library.stepsaver_tiles_are_broken.restype = c_long
    if library.stepsaver_tiles_are_broken():  # oneDNN reads this when it is first used, which is later
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", WITHOUT_TILES)
    return library


def source_hash() -> str:
    """Of the source that lies here; a library built from another one is left alone. setup.py computes the same."""
    return hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in SOURCES)).hexdigest()[:16]


def _built_from(library: ctypes.CDLL) -> str:
    try:
        return (ctypes.c_char * 16).in_dll(library, "stepsaver_source").value.decode()
    except ValueError:
        return ""


_library: ctypes.CDLL | None = None
problem: str | None = None  # why there are none
try:
    _library = _load()
    LONGEST_CONTEXT = c_long.in_dll(_library, "stepsaver_longest_context").value
    LONGEST_HEAD = c_long.in_dll(_library, "stepsaver_longest_head").value
    assert c_long.in_dll(_library, "stepsaver_block").value == BLOCK
except Unusable as error:
    problem, LONGEST_CONTEXT, LONGEST_HEAD = str(error), 0, 0


def library() -> ctypes.CDLL:
    """The compiled kernels, for the calls that stand in files of their own."""
    assert _library is not None
    return _library


def are_loaded() -> bool:
    return _library is not None


def serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for this machine, precision and device."""
    return _library is not None and dtype == torch.float32 and device.type == "cpu"


def scale_rows(
    x_ND: Tensor, floor_squared: float, added: Tensor | None = None, columns: Tensor | None = None
) -> Tensor:
    """Each row divided by the square root of the sum of its squares and `floor_squared`, times `columns`.

    With `added`, this is added to the rows first, in place.
    """
    assert _library is not None
    assert x_ND.dtype == torch.float32
    assert x_ND.is_contiguous()
    assert added is None or (added.dtype == x_ND.dtype and added.is_contiguous() and added.shape == x_ND.shape)
    width = x_ND.shape[-1]
    assert columns is None or (columns.dtype == x_ND.dtype and columns.shape == (width,) and columns.is_contiguous())
    out = torch.empty_like(x_ND)
    _library.stepsaver_scale_rows(
        x_ND.data_ptr(),
        None if added is None else added.data_ptr(),
        None if columns is None else columns.data_ptr(),
        out.data_ptr(),
        x_ND.numel() // width,
        width,
        floor_squared,
    )
    return out


def multiplies_blocks() -> bool:
    """Whether there is a multiplication by weights that lie in blocks for this processor."""
    return _library is not None and bool(_library.stepsaver_multiplies_blocks())


class Change(NamedTuple):
    """What float16 changes in some numbers."""

    rounded: int
    is_worse: bool  # one of them is not finite, or 2^-17 or larger and rounded
    squared_error: float
    squared_size: float  # not known of halves, which nothing changes


def lay_out(rows: Tensor, blocks: Tensor) -> Change:
    """Puts the rows of a weight into the first of these blocks, as the halves that are nearest to their numbers."""
    assert _library is not None
    assert rows.is_contiguous()
    assert blocks.is_contiguous()
    assert blocks.dtype == torch.float16
    count, inputs = rows.shape
    assert blocks.shape[1:] == (inputs, BLOCK)
    assert blocks.shape[0] * BLOCK >= count
    found = (ctypes.c_double * 4)()
    _library.stepsaver_lay_out(rows.data_ptr(), KINDS[rows.dtype], blocks.data_ptr(), count, inputs, found)
    return Change(int(found[0]), bool(found[1]), found[2], found[3])


def multiply(x_ND: Tensor, blocks: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fills `out`, which may be columns of a wider tensor, with the rows times a weight in half or single precision.

    The weight lies in [blocks, inputs, BLOCK]: outputs side by side, zeros after the last one.
    """
    assert _library is not None
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
    _library.stepsaver_multiply(
        x_ND.data_ptr(),
        blocks.data_ptr(),
        KINDS[blocks.dtype],
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        inputs,
        outputs,
        x_ND.stride(0),
        out.stride(0),
    )


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold first the gate and then up."""
    assert _library is not None
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _library.stepsaver_silu_product(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def copy_rows(x_ND: Tensor, stored: Tensor, indices: Tensor) -> None:
    """Puts each row at its index among the rows of `stored`; no two have the same."""
    assert _library is not None
    assert x_ND.dtype == stored.dtype == torch.float32
    assert x_ND.is_contiguous()
    assert stored.is_contiguous()
    assert indices.dtype == torch.int64
    rows, width = x_ND.shape
    assert indices.shape == (rows,)
    _library.stepsaver_copy_rows(x_ND.data_ptr(), stored.data_ptr(), indices.data_ptr(), rows, width)


def can_attend(head_dim: int, length: int) -> bool:
    """Whether heads are of a width, and a context of a length, that the attention kernel is made for."""
    return head_dim % 8 == 0 and head_dim <= LONGEST_HEAD and length <= LONGEST_CONTEXT


class Norms(NamedTuple):
    """Of each head's queries and keys: a factor per column of the former, then of the latter."""

    weight: Tensor  # [2 E]
    eps: float


def mix(
    projected: Tensor,
    rotation: Tensor,
    stored: Tensor,
    cache_rows: Tensor | None,
    segments: Tensor | None,
    norms: Norms | None = None,
) -> Tensor | None:
    """Norms and rotates packed rows in place, stores keys and values in a layer's [slots, 2 K, capacity, E], attends.

    A row [heads * E] holds its queries, and after them its keys and values if they are cached: counted over all heads
    of all slots, the first head goes to row cache_rows[n], each further one `capacity` rows on. `rotation` is as
    `models/rope.py` makes it. `segments`: per sample that attends, the first of its rows, the one after its last, its
    slot, how many rows of context the first one sees (at most what `can_attend` allows, for the last one too), and how
    many more each one sees than the one before it. Returns the mixed queries, of other rows whatever
    happened to be in memory.
    """
    assert _library is not None
    assert projected.dtype == rotation.dtype == stored.dtype == torch.float32
    _, kv_rows, capacity, head_dim = stored.shape
    rows, width = projected.shape
    heads = width // head_dim - (0 if cache_rows is None else kv_rows)
    assert rotation.numel() == rows * 2 * head_dim
    assert projected.is_contiguous()
    assert rotation.is_contiguous()
    assert stored.is_contiguous()
    assert cache_rows is None or (cache_rows.dtype == torch.int64 and cache_rows.shape == (rows,))
    assert segments is None or (segments.dtype == torch.int64 and segments.shape[1] == 5 and can_attend(head_dim, 0))
    assert norms is None or (norms.weight.dtype == torch.float32 and norms.weight.shape == (2 * head_dim,))
    out = None if segments is None else projected.new_empty((rows, heads * head_dim))
    _library.stepsaver_mix(
        projected.data_ptr(),
        None if out is None else out.data_ptr(),
        rotation.data_ptr(),
        stored.data_ptr(),
        None if cache_rows is None else cache_rows.data_ptr(),
        None if segments is None else segments.data_ptr(),
        None if norms is None else norms.weight.data_ptr(),
        rows,
        0 if segments is None else len(segments),
        heads,
        kv_rows // 2,
        head_dim,
        capacity,
        0.0 if norms is None else norms.eps,
    )
    return out


def most_likely(logits_NV: Tensor, mask_id: int) -> Tensor:
    """Per row [N, 3]: the first best token but `mask_id`, its probability among all, and the sum of the logits."""
    assert _library is not None
    logits_NV = logits_NV.contiguous()
    rows, width = logits_NV.shape
    assert mask_id < width
    out = logits_NV.new_empty((rows, 3), dtype=torch.float64)
    _library.stepsaver_most_likely(logits_NV.data_ptr(), out.data_ptr(), rows, width, mask_id)
    return out
