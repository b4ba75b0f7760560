"""Whether compiled functions serve: as the user says, or where `doctor` has found them equal on this very card."""

import hashlib
import json
import os
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import stepsaver
from stepsaver.engine.backends.gpu.fused import Fused
from stepsaver.engine.defaults import COMPILES, Compile
from stepsaver.engine.errors import UsageError, unknown_name

if TYPE_CHECKING:
    from stepsaver.engine.models.config import ModelConfig


def check_compile(compile: Compile, device: torch.device) -> None:
    if compile not in COMPILES:
        raise unknown_name("compile", compile, COMPILES)
    if compile == "on" and device.type != "cuda":
        raise UsageError("compile=on is for GPUs; a CPU has kernels of its own")
    if compile == "on" and _version("triton") is None:
        raise UsageError("compile=on needs triton, which torch's builds for CUDA bring on Linux")


def fused_backend(compile: Compile, config: "ModelConfig", dtype: torch.dtype, device: torch.device) -> Fused | None:
    check_compile(compile, device)
    if compile == "auto":
        compile = "on" if device.type == "cuda" and is_found_equal(config, dtype, device) else "off"
    return Fused() if compile == "on" else None


def is_found_equal(config: "ModelConfig", dtype: torch.dtype, device: torch.device) -> bool:
    try:
        return json.loads(finding_file(config, dtype, device).read_bytes())["equal"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def note_finding(config: "ModelConfig", dtype: torch.dtype, device: torch.device, *, equal: bool) -> None:
    path = finding_file(config, dtype, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_facts(config, dtype, device) | {"equal": equal}, indent=1))


def finding_file(config: "ModelConfig", dtype: torch.dtype, device: torch.device) -> Path:
    """In the user's cache folder: of a card, a driver, versions, and the shape of a model."""
    named = hashlib.sha256(json.dumps(_facts(config, dtype, device), sort_keys=True, default=str).encode()).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "stepsaver" / "compiled" / f"{named[:16]}.json"


def _facts(config: "ModelConfig", dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    return {
        "card": torch.cuda.get_device_name(device),
        "driver": str(torch._C._cuda_getDriverVersion()),  # type: ignore[attr-defined]
        "torch": torch.__version__,
        "triton": str(_version("triton")),
        "stepsaver": stepsaver.__version__,
        "dtype": str(dtype),
        "model": str(sorted(asdict(config).items())),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
