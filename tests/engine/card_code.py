"""What torch's compiler makes for a card that is not there: its kernels, what it calls beside them, and their cubins.

Fake CUDA tensors, a device guard that does nothing, and a card's properties made up: it patches torch's insides, so it
runs in a process of its own (`test_card_code.py`) and prints JSON. Written for torch 2.13.
usage: python -m tests.engine.card_code 75|80|90 [head_norms]
"""

import collections
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo.device_interface as interface
import torch._inductor.config as inductor
import torch._inductor.fx_passes.joint_graph as joint_graph
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._subclasses.fake_tensor as fake_tensor
import triton
from torch._inductor.graph import GraphLowering
from torch.utils.cpp_extension import include_paths, library_paths
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.shapes import SHAPES
from stepsaver.engine.backends.gpu import functions
from stepsaver.engine.backends.gpu.fused import compiled

GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
# Processors of a card, and of each how many threads and how much shared memory.
UNITS = {75: (40, 1024, 65536), 80: (108, 2048, 166912), 90: (132, 2048, 232448)}
CALL = r"^\s+(?:[\w, \[\]]+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+|triton_\w+?\d+\.run|\w+\.copy_)\("
KERNEL = r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)'''"
ROWS, PLACES = 32, 1024
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def pretend(card: int, folder: Path) -> None:
    """Makes torch, its compiler and triton believe in a card."""
    (folder / "guard.cpp").write_text(GUARD)
    includes = [f"-I{each}" for each in include_paths()]
    libraries = [f"-L{each}" for each in library_paths()] + ["-lc10"]
    command = ["g++", "-std=c++20", "-O1", "-w", "-shared", "-fPIC", *includes, folder / "guard.cpp", *libraries]
    subprocess.run([*command, "-o", folder / "guard.so"], check=True)
    torch.ops.load_library(folder / "guard.so")
    units, threads, shared = UNITS[card]
    properties = types.SimpleNamespace(
        name="made up",
        major=card // 10,
        minor=card % 10,
        multi_processor_count=units,
        max_threads_per_multi_processor=threads,
        regs_per_multiprocessor=65536,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=shared,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=shared,
        total_memory=16 << 30,
        gcnArchName="",
        L2_cache_size=4 << 20,
    )
    capability = (card // 10, card % 10)
    common: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda *_, **__: card >= 80,
    }
    cuda = {
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: "made up",
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, value in (common | cuda).items():
        setattr(torch.cuda, name, value)
    own = {"get_raw_stream": lambda device: 0, "exchange_device": lambda d: 0, "maybe_exchange_device": lambda d: 0}
    for name, value in (common | own).items():
        setattr(interface.CudaInterface, name, staticmethod(value))
    interface.caching_worker_device_properties["cuda"] = [properties]
    interface.caching_worker_current_devices["cuda"] = 0
    driver = types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", card, 32),
        get_current_device=lambda: 0,
        get_device_capability=lambda device=0: capability,
        map_python_to_cpp_type=str,
    )
    triton.runtime.driver.set_active(driver)
    joint_graph.lazy_init = lambda *_: None  # its patterns are made with real tensors
    fake_tensor.init_gpu_context = lambda device: None
    triton_helpers.set_driver_to_gpu = lambda: None
    inductor.joint_graph_constant_folding = False
    inductor.force_disable_caches = True
    inductor.compile_threads = 1


class _Made(Exception):
    """The code is there; nothing is loaded or run."""


def code_of(function: Any, given: tuple[Any, ...]) -> str:
    codes: list[str] = []

    def stop(graph: GraphLowering) -> None:
        code = graph.codegen()[0]
        codes.append(getattr(code, "value", code))
        raise _Made

    with mock.patch.object(GraphLowering, "_compile_to_module", stop):
        torch._dynamo.reset()
        try:
            compiled(function)(*given)
        except Exception:
            if not codes:
                raise
    return codes[-1]


def cases(norms: bool) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Each function with what a forward of the 7B gives it: one sample, and eight in two groups."""
    config = SHAPES["7B"]
    hidden, width, heads, kv_heads = config.hidden, config.head_dim, config.heads, config.kv_heads
    half, index = torch.float16, torch.int64

    def made(*shape: int, dtype: torch.dtype = half) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    projected = made(ROWS, (heads + 2 * kv_heads) * width)
    turned = (made(ROWS, 2, 1, width), None, made(2 * width) if norms else None, 1e-6)
    stored = torch.empty(2, 1, 2 * kv_heads, PLACES, width, dtype=half)[1]
    several = torch.empty(2, 8, 2 * kv_heads, PLACES, width, dtype=half)[1]
    places, chosen = made(ROWS, 2, dtype=index), made(8 * 6, dtype=index)
    folded = made(1, kv_heads, ROWS * heads // kv_heads, width)
    groups = [made(samples, kv_heads, 8 * heads // kv_heads, width) for samples in (3, 5)]
    return {
        "add_and_norm": (functions.add_and_norm, (made(ROWS, hidden), made(ROWS, hidden), made(hidden), 1e-6)),
        "rotate_and_store": (functions.rotate_and_store, (projected, *turned, stored, places, None, 1)),
        "rotate_and_store, a group": (
            functions.rotate_and_store,
            (projected, *turned, several, places, chosen, 8),
        ),
        "rotate_and_store, groups": (functions.rotate_and_store, (projected, *turned, several, places, None, None)),
        "fold": (functions.fold, (made(ROWS, heads, width), chosen, 8, kv_heads)),
        "pack": (functions.pack, ([folded], None, heads)),
        "pack, groups": (functions.pack, (groups, made(ROWS, dtype=index), heads)),
        "silu_product": (functions.silu_product, (made(ROWS, 2 * config.mlp),)),
        "choose_token": (functions.choose_token, (made(ROWS, config.vocab, dtype=torch.float32), 1)),
    }


def cubins(name: str, source: str, card: int, folder: Path) -> list[dict[str, int]]:
    """What each configuration of a kernel takes, compiled for a card. What is spilled lies on the stack."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuner, target, found = getattr(module, name), GPUTarget("cuda", card, 32), []
    for config in tuner.configs:
        meta = tuner._create_compile_meta(config)
        options = tuner._create_compile_options(config, meta)
        given = ASTSource(tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        made = triton.compile(given, target=target, options=options)
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        used = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        found.append({name: int(re.findall(rf"{name}:(\d+)", used)[-1]) for name in ("REG", "STACK", "SHARED")})
    return found


def main() -> None:
    card, norms = int(sys.argv[1]), "head_norms" in sys.argv
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pretend(card, folder)
        report: dict[str, Any] = {}
        for title, code in generated(norms).items():
            body = code[code.index("def call(") :]
            calls = collections.Counter(
                "triton" if each.startswith("triton_") else each for each in re.findall(CALL, body, re.M)
            )
            sources = dict(re.findall(KERNEL, code, re.S))
            kernels = [cubins(kernel, source, card, folder) for kernel, source in sources.items()]
            report[title] = {"calls": dict(calls), "kernels": kernels}
    print(json.dumps(report))


def generated(norms: bool) -> dict[str, str]:
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode(), torch.device("cuda"):
        return {title: code_of(*case) for title, case in cases(norms).items()}


if __name__ == "__main__":
    main()
