"""The compiled kernels: found, checked against the source beside them, and called.

They are compiled when the package is installed, if there is a compiler. Without it, in other precisions and on a GPU
torch's operations do the same; with `STEPSAVER_KERNELS=0` everywhere. With `STEPSAVER_KERNELS=plain` they use no
instructions that only some processors have, with `avx2` none beyond.
"""

import ctypes
import hashlib
import os
from ctypes import Structure, byref, c_float, c_long, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch  # before the kernels, which then share its threads if it uses the same OpenMP

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
KINDS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}  # of numbers, as the C names them
BLOCK = 32  # outputs that lie side by side in a weight
WITHOUT_TILES = "AVX512_CORE_FP16"  # the most that oneDNN knows below them
NO_MEMORY, OUT_OF_BOUNDS = 1, 2  # what a call returns instead of 0


def _fields(*parts: tuple[str, type]) -> list[tuple[str, type]]:
    return [(name, kind) for names, kind in parts for name in names.split()]


class MultiplyCall(Structure):
    _fields_ = _fields(("x blocks bias out", c_void_p), ("kind rows inputs outputs inputs_apart outputs_apart", c_long))


class AttendCall(Structure):
    _fields_ = _fields(
        ("projected out stored turns query_scale places segments views", c_void_p),
        ("segment_count rows heads kv_heads head_dim slots capacity", c_long),
        ("head_norms", c_void_p),
        ("eps", c_float),
    )


class RowSubset(Structure):
    _fields_ = _fields(("rows deltas", c_void_p), ("count", c_long))


class Shape(Structure):
    _fields_ = _fields(("heads kv_heads head_dim hidden mlp kind is_large", c_long), ("eps", c_float))


class LayersCall(Structure):
    _fields_ = _fields(
        ("layers deltas h kept_h stored", c_void_p),
        ("written_turns written_scale attention_turns attention_scale places segments views", c_void_p),
        ("segment_count", c_long),
        ("written attention mlp attention_reused mlp_reused", RowSubset),
        ("count rows delta_rows slots capacity", c_long),
        ("shape", Shape),
    )


SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (*[c_void_p] * 4, c_long, c_long, c_float),
    "silu_product": (c_void_p, c_void_p, c_long, c_long),
    "copy_rows": (*[c_void_p] * 3, *[c_long] * 3),
    "argmax": (c_void_p, c_void_p, c_long, c_long, c_long),
    "pack_weight": (c_void_p, c_long, c_void_p, c_long, c_long, c_void_p),
    "multiply": (c_void_p,),
    "attend": (c_void_p,),
    "run_layers": (c_void_p,),
    "run_reused_layers": (c_void_p,),
    "multiplies_blocks": (),
    "tiles_are_broken": (),
}
RETURN_NOTHING = ("rms_norm", "silu_product", "pack_weight", "multiply")


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
        function = getattr(library, f"stepsaver_{name}")
        function.argtypes, function.restype = arguments, None if name in RETURN_NOTHING else c_long
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


def is_loaded() -> bool:
    return _library is not None


def library() -> ctypes.CDLL:
    assert _library is not None
    return _library


def has_run(status: int) -> bool:
    """Whether a call ran; if not, nothing has changed. False: there was no memory for it."""
    if status == OUT_OF_BOUNDS:
        raise IndexError("an index is outside the tensor that it is for")
    return status != NO_MEMORY


def call(name: str, given: Structure) -> int:
    """The status of a kernel that takes a struct."""
    return int(getattr(library(), name)(byref(given)) or 0)


def multiplies_blocks() -> bool:
    """Whether there is a multiplication by weights that lie in blocks for this processor."""
    return _library is not None and bool(_library.stepsaver_multiplies_blocks())
