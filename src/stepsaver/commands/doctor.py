"""`stepsaver doctor`: whether this machine is ready, one line per thing that matters; and a checkpoint on it."""

import argparse
import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from stepsaver.extras import missing_part

HELP = "whether this machine is ready, and a checkpoint on it"
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub")
OPTIONAL = ("lm_eval", "plotly", "submitit")  # one of each extra


class Check(NamedTuple):
    """What was found out about the machine, or about a checkpoint on it."""

    name: str
    is_fine: bool
    says: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="M", help="also load, decode, compare and time a checkpoint")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ... (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    found = []
    for finding in _findings(options):
        found.append(finding)
        if not options.json:
            print(f"{'ok ' if finding.is_fine else 'NO '} {finding.name}: {finding.says}", flush=True)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found]))
    return 0 if all(finding.is_fine for finding in found) else 1


def _findings(options: argparse.Namespace) -> Iterator[Check]:
    yield from (_python(), *map(_package, PACKAGES), *map(_optional, OPTIONAL))
    yield from (_device(options.device, options.dtype), _weights(), _kernels(), _tiles(), _embedded(), _hub())
    if options.model is not None:
        yield from _model(options)


def _model(options: argparse.Namespace) -> Iterable[Check]:
    from stepsaver.commands._checkup import check_up
    from stepsaver.evaluation.open_model import open_model

    opened = open_model(options.model, device=options.device, dtype=options.dtype)
    return check_up(opened)


def _python() -> Check:
    return Check("python", True, f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")


def _package(name: str) -> Check:
    try:
        return Check(name, True, version(name))
    except PackageNotFoundError:
        return Check(name, False, "not installed")


def _optional(name: str) -> Check:
    found = _package(name)
    return found if found.is_fine else Check(name, True, f"not installed; {missing_part(name)}")


def _device(name: str, dtype_name: str) -> Check:
    import torch

    from stepsaver.engine.machine import choose_device, choose_dtype

    device = choose_device(name)
    dtype = str(choose_dtype(dtype_name, device)).removeprefix("torch.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    return Check("device", True, f"{device} ({name}), dtype {dtype_name} means {dtype}")


def _weights() -> Check:
    from stepsaver.engine.backends.cpu.weights import can_pack, halves_problem

    problem = halves_problem()
    sixteen = f"not in 16 bits ({problem})" if problem else "in 16 bits where float16 holds them"
    others = "packed by oneDNN" if can_pack() else "plain, because this torch has no oneDNN"
    return Check("weights", True, f"on the CPU {sixteen}; large ones in float32 {others}")


def _kernels() -> Check:
    from stepsaver.engine.backends.cpu.library import problem

    says = f"torch's operations instead ({problem})" if problem else "used on the CPU in float32"
    return Check("kernels", True, says)


def _tiles() -> Check:
    from stepsaver.engine.backends.cpu.tiles import LIMIT, are_announced, limit_to_what_works

    if not are_announced():
        return Check("matrix tiles", True, "none on this processor")
    if not limit_to_what_works():
        return Check("matrix tiles", False, "announced and broken: bfloat16 and float16 on the CPU are refused")
    limit = os.environ.get(LIMIT)
    return Check("matrix tiles", True, f"announced, and oneDNN is kept to {limit}" if limit else "used in 16 bits")


def _embedded() -> Check:
    from stepsaver.evaluation.embedded import MODEL_FOLDER

    found = (MODEL_FOLDER / "model.safetensors").exists()
    return Check("embedded model", found, "found" if found else f"missing in {MODEL_FOLDER}")


def _hub() -> Check:
    """Says whether there is a login for gated data, never what it is."""
    from huggingface_hub import get_token

    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    login = "a login is set" if get_token() else "no login (gated data such as GPQA needs one)"
    return Check("hub", True, f"{'offline' if offline else 'online'}, {login}")
