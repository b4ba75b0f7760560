"""The few operations of our own: what lies between the matrix multiplications of a layer, on a CPU in float32.

`kernels.c` is compiled when the package is installed, if there is a compiler. Without it, in other precisions and on a
GPU the same is done by torch's operations, right beside the calls of these; with `STEPSAVER_KERNELS=0` everywhere.
"""

import ctypes
import hashlib
import os
from ctypes import c_float, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # before the kernels, which then share its threads if it uses the same OpenMP
from torch import Tensor

SIGNATURES = {
    "stepsaver_scale_rows": (c_void_p, c_void_p, c_long, c_long, c_float),
    "stepsaver_silu_product": (c_void_p, c_void_p, c_long, c_long),
    "stepsaver_rotate": (c_void_p, c_void_p, c_long, c_long, c_long, c_long),
    "stepsaver_store": (c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_long, c_long),
    "stepsaver_attend": (c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_long, c_long, c_long, c_long, c_long),
    "stepsaver_most_likely": (c_void_p, c_void_p, c_long, c_long, c_long),
}

FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "rows.h")


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
except Unusable as error:
    problem, LONGEST_CONTEXT, LONGEST_HEAD = str(error), 0, 0


def serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for this machine, precision and device."""
    return _library is not None and dtype == torch.float32 and device.type == "cpu"


def scale_rows(x_ND: Tensor, floor_squared: float) -> Tensor:
    """Each row divided by the square root of the sum of its squares and `floor_squared`."""
    assert _library is not None
    assert x_ND.dtype == torch.float32
    x_ND = x_ND.contiguous()
    out = torch.empty_like(x_ND)
    width = x_ND.shape[-1]
    _library.stepsaver_scale_rows(x_ND.data_ptr(), out.data_ptr(), x_ND.numel() // width, width, floor_squared)
    return out


def silu_product(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, of rows that hold first the gate and then up."""
    assert _library is not None
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _library.stepsaver_silu_product(gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
    return out


def rotate_(x_NHE: Tensor, rotation: Tensor, heads: int) -> None:
    """Turns the first `heads` heads of each row in place; `rotation` as `models/rope.py` makes it."""
    assert _library is not None
    head_dim = x_NHE.shape[-1]
    rows = rotation.numel() // (2 * head_dim)
    assert x_NHE.numel() == rows * x_NHE.shape[-2] * head_dim
    _library.stepsaver_rotate(x_NHE.data_ptr(), rotation.data_ptr(), rows, x_NHE.stride(-3), heads, head_dim)


def store(x_NHE: Tensor, stored: Tensor, places: Tensor) -> None:
    """Copies each row's heads into `stored` [slots, heads, capacity, E].

    Counted over all slots and heads, the first head goes to row places[n], each further one `capacity` rows on.
    """
    assert _library is not None
    rows, heads, head_dim = x_NHE.shape
    capacity = stored.shape[2]
    _library.stepsaver_store(
        x_NHE.data_ptr(), stored.data_ptr(), places.data_ptr(), rows, x_NHE.stride(0), heads, head_dim, capacity
    )


def can_attend(head_dim: int, length: int) -> bool:
    """Whether heads are of a width, and a context of a length, that the attention kernel is made for."""
    return head_dim % 8 == 0 and head_dim <= LONGEST_HEAD and length <= LONGEST_CONTEXT


def attend(queries_NHE: Tensor, stored: Tensor, segments: Tensor) -> Tensor:
    """Softmax attention of several samples over their slots of a layer's cache [slots, 2 K, capacity, E].

    `segments`: per sample the first of its packed queries, the one behind its last, its slot, its rows of context.
    """
    assert _library is not None
    _, heads, head_dim = queries_NHE.shape
    _, kv_rows, capacity, _ = stored.shape
    out = queries_NHE.new_empty(queries_NHE.shape)
    _library.stepsaver_attend(
        queries_NHE.data_ptr(),
        out.data_ptr(),
        stored.data_ptr(),
        segments.data_ptr(),
        len(segments),
        queries_NHE.stride(0),
        heads,
        kv_rows // 2,
        head_dim,
        capacity,
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
