"""A device that does nothing, for counting what a forward asks of one: launches, uploads, downloads, allocations.

It is torch's device for backends of others (PrivateUse1), compiled from `null_device.cpp` when it is first used. Unlike
the meta device it takes every path that a GPU takes, in C++ too; what remains of a forward's time is the host's.
"""

import ctypes
import os
import shutil
import subprocess
import tempfile
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "nullgpu"


class Counts(NamedTuple):
    launches: int
    uploads: int
    downloads: int
    allocations: int

    def since(self, before: "Counts") -> "Counts":
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


class NullDevice:
    def __init__(self, library: Path) -> None:
        torch.ops.load_library(library)
        self._counts = ctypes.CDLL(str(library)).counts
        torch.utils.rename_privateuse1_backend(NAME)
        module = types.ModuleType(f"torch.{NAME}")
        module.__dict__.update(
            is_available=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            is_initialized=lambda: True,
            _lazy_init=lambda: None,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
        )
        torch._register_device_module(NAME, module)

    def counts(self) -> Counts:
        found = (ctypes.c_int64 * len(Counts._fields))()
        self._counts(found)
        return Counts(*found)


_device: list[NullDevice] = []  # it can be registered once


def null_device() -> NullDevice:
    """The device; skips the test where there is no compiler."""
    if not _device:
        compiler = os.environ.get("CXX") or shutil.which("g++")
        if compiler is None:
            pytest.skip("needs a C++ compiler for the device that does nothing")
        library = Path(tempfile.mkdtemp(prefix="null_device")) / "null_device.so"
        includes = [f"-I{each}" for each in include_paths()]
        libraries = [f"-L{each}" for each in library_paths()] + ["-lc10", "-ltorch_cpu", "-ltorch"]
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC"]
        subprocess.run([compiler, *options, *includes, SOURCE, *libraries, "-o", library], check=True)
        _device.append(NullDevice(library))
    return _device[0]
