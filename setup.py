"""The compiled part of the package; everything else about it is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "src/stepsaver/engine/backends/cpu"
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
)  # in the order of backends/cpu/library.py
source = b"".join((Path(__file__).parent / FOLDER / name).read_bytes() for name in SOURCES)

setup(
    ext_modules=[
        Extension(
            "stepsaver.engine.backends.cpu._kernels",
            [f"{FOLDER}/{name}" for name in SOURCES if name.endswith(".c")],
            depends=[f"{FOLDER}/{name}" for name in SOURCES if name.endswith(".h")],
            define_macros=[("SOURCE_HASH", f'"{hashlib.sha256(source).hexdigest()[:16]}"')],
            extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler, or with one that does not know these flags, torch's operations serve
        )
    ]
)
