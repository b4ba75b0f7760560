"""Where a run began: host, job, and the device with its memory and driver. Not part of its identity."""

import os
import platform
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

CPU_FACTS = Path("/proc/cpuinfo")


def machine_facts(device: torch.device) -> dict[str, Any]:
    return {"host": platform.node(), "job": job_id(), "device": device_name(device)} | _memory_and_driver(device)


def job_id() -> str | None:
    """Returns SLURM's id of this job, with the index in its array; None outside a job. Reads no other variable."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_FACTS.read_text(encoding="utf-8").splitlines() if CPU_FACTS.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _memory_and_driver(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"memory_bytes": torch.cuda.get_device_properties(device).total_memory, "driver": _driver(device)}
    return {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "driver": None}


def _driver(device: torch.device) -> str | None:
    """Returns the version that the vendor's own tool names; None if it is not installed or does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def peak_memory(device: torch.device) -> int:
    """Returns the most bytes that this process has used so far: of the GPU's memory, else of the machine's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_name(device: torch.device) -> str | None:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
