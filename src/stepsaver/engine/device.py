"""Which device a model runs on, and in which precision."""

import platform
from pathlib import Path

import torch

from stepsaver.engine.errors import UsageError, shown


def choose_device(name: str) -> torch.device:
    """`auto`: the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device {shown(name)} is unknown; allowed: auto, cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported; allowed: auto, cpu, cuda, cuda:N")
    if (device.index or 0) >= (torch.cuda.device_count() if device.type == "cuda" else 1):
        raise UsageError(f"device {name!r} is not available on this machine")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 on CUDA from compute capability 8.0, float16 on older CUDA, float32 elsewhere."""
    known = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in known:
            raise UsageError(f"dtype {shown(name)} is unknown; allowed: auto, {', '.join(known)}")
        return known[name]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


CPU_FACTS = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_FACTS.read_text(encoding="utf-8").splitlines() if CPU_FACTS.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
