"""What makes two runs the same run: everything that changes numbers, and nothing else."""

import hashlib
import inspect
import json
import os
import platform
import resource
import shutil
import subprocess
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import stepsaver
from stepsaver.bench.documents import Identity
from stepsaver.engine.machine import device_name

PACKAGE = Path(stepsaver.__file__).parent
NUMERIC_PACKAGES = ("torch", "numpy", "lm_eval", "tokenizers", "datasets")


@cache
def source_hash() -> str:
    """Returns the hash of the engine's and the evaluation's source."""
    digest = hashlib.sha256()
    for part in ("engine", "evaluation"):
        for path in sorted(path for path in (PACKAGE / part).rglob("*") if path.suffix in (".py", ".c", ".h")):
            digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def plugin_hashes(objects: Iterable[object]) -> dict[str, str]:
    """Returns, by name, the hashes of rules and policies that are not ours, which `source_hash` does not cover."""
    foreign = [type(each) for each in objects if not type(each).__module__.startswith("stepsaver.")]
    return {vars(each)["name"]: hashlib.sha256(_source(each)).hexdigest()[:16] for each in foreign}


def _source(made: type) -> bytes:
    """Returns the file that defines a class, since it may use the rest of it; else the class; else its functions."""
    try:
        return Path(inspect.getsourcefile(made) or "").read_bytes()
    except (OSError, TypeError):
        pass
    try:
        return inspect.getsource(made).encode()
    except (OSError, TypeError):
        functions = sorted(vars(made).items(), key=lambda each: each[0])
        return b"".join(each.__code__.co_code for _, each in functions if inspect.isfunction(each))


def folder_hash(folder: Path) -> str:
    """Returns the hash of a checkpoint: its weights, configuration and tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".jinja", ".txt"):
            digest.update(path.name.encode())
            with path.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:16]


def library_versions() -> dict[str, str]:
    return {name: version(name) for name in NUMERIC_PACKAGES}


def environment() -> dict[str, Any]:
    """Returns what this process runs on: versions and threads. Never environment variables, which may hold secrets."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        **library_versions(),
    }


def run_id(identity: Identity) -> str:
    return hashlib.sha256(json.dumps(identity.as_json(), sort_keys=True).encode()).hexdigest()[:12]


def differing_parts(one: Identity, other: Identity) -> list[str]:
    """Returns the names of the fields that make two runs different ones."""
    ours, theirs = (json.loads(json.dumps(each.as_json())) for each in (one, other))
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def git_state() -> dict[str, Any]:
    """Returns commit, branch, and whether `src/` differs from the commit; all None if there is no git."""
    root = PACKAGE.parent.parent
    try:
        commit = _git(root, "rev-parse", "HEAD")
        branch = _git(root, "branch", "--show-current") or None  # none: a detached HEAD
        changed = _git(root, "status", "--porcelain", "--", "src")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "branch": None, "dirty": None}
    return {"commit": commit, "branch": branch, "dirty": bool(changed)}


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.strip()


def machine_facts(device: torch.device) -> dict[str, Any]:
    return {"host": platform.node(), "job": job_id(), "device": device_name(device)} | _memory_and_driver(device)


def job_id() -> str | None:
    """Returns SLURM's id of this job, with the index in its array; None outside a job. Reads no other variable."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")


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
