"""The compiled part of the package; everything else about it is in pyproject.toml."""

import hashlib
from pathlib import Path

from setuptools import Extension, setup

FOLDER = "src/stepsaver/engine/kernels"
source = b"".join((Path(__file__).parent / FOLDER / name).read_bytes() for name in ("kernels.c", "rows.h"))

setup(
    ext_modules=[
        Extension(
            "stepsaver.engine.kernels._kernels",
            [f"{FOLDER}/kernels.c"],
            depends=[f"{FOLDER}/rows.h"],
            define_macros=[("SOURCE_HASH", f'"{hashlib.sha256(source).hexdigest()[:16]}"')],
            extra_compile_args=["-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"],
            extra_link_args=["-fopenmp"],
            optional=True,  # without a compiler, or with one that does not know these flags, torch's operations serve
        )
    ]
)
