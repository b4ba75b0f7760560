"""Reads checkpoint folders into the network, and writes them. Safetensors only; no code of a checkpoint is run."""

import ctypes
import sys
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stepsaver.engine.backends.cpu.tiles import require_working_tiles
from stepsaver.engine.backends.cpu.weights import check_weights
from stepsaver.engine.backends.gpu.choice import fused_backend
from stepsaver.engine.defaults import COMPILE, WEIGHTS, Compile, Weights
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.machine import require_own_threads
from stepsaver.engine.models import linear
from stepsaver.engine.models.architecture import architecture_named
from stepsaver.engine.models.config import ModelConfig, is_there, read_config, read_json
from stepsaver.engine.models.linear import Linear
from stepsaver.engine.models.transformer import Transformer

# Our fused modules, and the checkpoint's modules whose rows they stack. An architecture may call these otherwise.
LAYER_MODULES = {
    "attention.norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.head_norms": ("self_attn.q_norm", "self_attn.k_norm"),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
LAYERS = "model.layers"
OUTER_MODULES = {"embedding": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)}
FLOATS = ("F16", "BF16", "F32", "F64")  # as safetensors names them
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)  # buffers of old exports, computed here


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint, and the rows of our parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    rows: slice


def stored_tensors(model: Transformer) -> dict[str, tuple[StoredTensor, ...]]:
    """For each parameter of the network, the tensors of the checkpoint that make it up."""
    return {name: tuple(_stored(name, p.shape, model.config)) for name, p in model.named_parameters()}


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    weights: Weights = WEIGHTS,
    compile: Compile = COMPILE,
) -> Transformer:
    """The network with the folder's weights. Names and shapes are checked before any weight is read.

    Section by section, each tensor is read, brought into the network's layout, and released, so the checkpoint is never
    in memory twice. The head comes before the layers: it is the largest, and needs the most extra memory.
    """
    require_own_threads()
    device = torch.device(device)
    check_weights(weights, dtype, device)
    require_working_tiles(dtype, device)
    config = read_config(folder)
    files = _files_by_tensor(folder)
    _check_depth(folder, files, config)
    model = _empty_model(config, dtype)
    model.fused = fused_backend(compile, config, dtype, device)
    wanted = stored_tensors(model)
    _check(folder, files, wanted, config)

    def numbers(name: str, _: Tensor) -> Tensor:
        # opened again for every tensor: a file's mapping counts as memory as long as it is held
        stored = [open_tensors(files[each.name]).get_tensor(each.name) for each in wanted[name]]
        return stored[0] if len(stored) == 1 else torch.cat(stored)

    order = sorted(model.sections(), key=lambda name: name.startswith("layers"))
    return _fill(model, order, numbers, device=device, weights=weights)


def save_weights(model: Transformer, path: Path, *, dtype: torch.dtype) -> None:
    """Writes the weights under the checkpoint format's names: to a temporary file first, which is then renamed."""
    wanted = stored_tensors(model)
    tensors = {
        stored.name: parameter.detach()[stored.rows].to("cpu", dtype).clone()
        for name, parameter in model.named_parameters()
        for stored in wanted[name]
    }
    beside = path.with_name(path.name + ".writing")
    save_file(tensors, beside, metadata={"format": "pt"})
    beside.replace(path)


def random_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    seed: int = 0,
    weights: Weights = WEIGHTS,
    stored: torch.dtype = torch.float32,
) -> Transformer:
    """A model of the given shape with random weights, for speed measurements and tests. The numbers are what a
    checkpoint of precision `stored` could hold. They are made section by section.
    """
    device = torch.device(device)
    check_weights(weights, dtype, device)
    require_working_tiles(dtype, device)
    generator = torch.Generator().manual_seed(seed)

    def numbers(name: str, parameter: Tensor) -> Tensor:
        if "norm" in name:
            return torch.ones(parameter.shape)
        return torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator).to(stored)

    model = _empty_model(config, dtype)
    return _fill(model, list(model.sections()), numbers, device=device, weights=weights)


def _empty_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    with torch.device("meta"):
        return Transformer(config).to(dtype)


def _fill(
    model: Transformer,
    order: Iterable[str],
    numbers: Callable[[str, Tensor], Tensor],
    *,
    device: torch.device,
    weights: Weights,
) -> Transformer:
    """Fills and prepares one section after another. `numbers` returns a parameter's numbers, given its name."""
    is_laid_out = model.dtype == torch.float32 and device.type == "cpu"
    names = {parameter: name for name, parameter in model.named_parameters()}
    for section in order:
        for module in (inner for outer in model.sections()[section] for inner in outer.modules()):
            for attribute, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in names:  # a tied head, already filled
                    continue
                found = _as_wanted((name := names.pop(parameter)), numbers(name, parameter), parameter.dtype, device)
                # preparing a large map releases what was read; anything that stays must not hold the file's mapping
                is_let_go = isinstance(module, Linear) and found.numel() >= linear.LARGE and is_laid_out
                found = found if is_let_go else found.clone()
                filled = nn.Parameter(found, requires_grad=False)
                setattr(module, attribute, filled)
                if model.config.tied and module is model.embedding:
                    model.head.weight = filled
        model.prepare_section(section, weights)
        _return_freed_memory()
    assert not names, "every parameter belongs to a section"
    return model.eval()


def _return_freed_memory() -> None:
    """Makes glibc return freed memory, which it keeps if memory around it is in use. Other systems lack the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _as_wanted(name: str, found: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A parameter for the model's precision and device. A large 16-bit weight for float32 on a CPU stays in 16 bits."""
    is_single = dtype == torch.float32 and device.type == "cpu"
    stays = (
        is_single
        and found.dtype in (torch.float16, torch.bfloat16)
        and found.dim() > 1
        and found.numel() >= linear.LARGE
    )
    wanted = found.to(device).to(found.dtype if stays else dtype)
    if dtype == torch.float16 != found.dtype and not wanted.is_meta and wanted.abs().amax().isinf():
        raise UsageError(f"{name} has numbers that float16 does not hold: use bfloat16 or float32")
    return wanted


def _stored(name: str, shape: torch.Size, config: ModelConfig) -> Iterable[StoredTensor]:
    called = architecture_named(config.architecture).modules
    module, attribute = name.rsplit(".", 1)
    prefix = ""
    sources: tuple[str, ...] = OUTER_MODULES.get(module, ())
    if not sources:
        _, index, inner = module.split(".", 2)
        prefix, sources = f"{called.get(LAYERS, LAYERS)}.{index}.", LAYER_MODULES[inner]
    start = 0
    for source, rows in zip(sources, _stacked_rows(module, shape[0], config), strict=True):
        yield StoredTensor(
            f"{prefix}{called.get(source, source)}.{attribute}", (rows, *shape[1:]), slice(start, start + rows)
        )
        start += rows


def _stacked_rows(module: str, rows: int, config: ModelConfig) -> tuple[int, ...]:
    if module.endswith("attention.qkv"):
        kv_width = config.kv_heads * config.head_dim
        return (config.heads * config.head_dim, kv_width, kv_width)
    if module.endswith("attention.head_norms"):
        return (config.head_dim, config.head_dim)
    if module.endswith("mlp.gate_up"):
        return (config.mlp, config.mlp)
    return (rows,)


def output_modules(config: ModelConfig) -> Iterable[str]:
    """What the checkpoint calls the output projection of each layer's attention."""
    called = architecture_named(config.architecture).modules
    (module,) = LAYER_MODULES["attention.output"]
    for layer in range(config.layers):
        yield f"{called.get(LAYERS, LAYERS)}.{layer}.{called.get(module, module)}"


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        paths = [folder / shard for shard in _shards(index)]
    elif (folder / "model.safetensors").exists():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in paths if not path.exists()]
    if absent or not paths:
        raise UsageError(f"{folder} has no {', '.join(absent) or '*.safetensors file'}")
    return {name: path for path in paths for name in open_tensors(path).keys()}  # noqa: SIM118 (not a dict)


def _shards(index: Path) -> list[str]:
    """The names of the files that a weight index lists. All must be in its folder."""
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise UsageError(f"{index} is not a weight index: weight_map is {shown(shards)}")
    outside = next((name for name in shards.values() if name in (".", "..") or set(name) & {"/", "\0"}), None)
    if outside is not None:
        raise UsageError(f"{index} names files outside its folder, such as {shown(outside)}")
    return sorted(set(shards.values()))


def open_tensors(path: Path) -> "safe_open":
    is_there(path, most=inf)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is damaged or cut short: {error}") from None


def _check_depth(folder: Path, files: Iterable[str], config: ModelConfig) -> None:
    """Checks the number of layers before the network is built, which takes a while if the number is absurd."""
    prefix = architecture_named(config.architecture).modules.get(LAYERS, LAYERS) + "."
    stored = {name.removeprefix(prefix).split(".")[0] for name in files if name.startswith(prefix)}
    if len(stored) != config.layers:
        raise UsageError(f"{folder}: config.json has {config.layers} layers, the weights have {len(stored)}")


def _check(
    folder: Path, files: dict[str, Path], wanted: dict[str, tuple[StoredTensor, ...]], config: ModelConfig
) -> None:
    expected = {stored.name: stored.shape for parts in wanted.values() for stored in parts}
    missing = expected.keys() - files.keys()
    if missing:
        raise UsageError(f"{folder} lacks {len(missing)} tensors: {listed(missing)}")
    surplus = {name for name in files.keys() - expected.keys() if not name.endswith(IGNORED_ENDINGS)}
    if config.tied:
        surplus -= {stored.name for stored in _stored("head.weight", torch.Size((config.vocab, config.hidden)), config)}
    if surplus:
        raise UsageError(f"{folder} has {len(surplus)} tensors that its architecture does not know: {listed(surplus)}")
    handles = {path: open_tensors(path) for path in set(files.values())}
    slices = {name: handles[files[name]].get_slice(name) for name in expected}
    unusable = [f"{name} is {each.get_dtype()}" for name, each in slices.items() if each.get_dtype() not in FLOATS]
    if unusable:
        raise UsageError(
            f"{folder} has {len(unusable)} tensors that are not of {', '.join(FLOATS)}: {listed(unusable)}"
        )
    found = {name: tuple(each.get_shape()) for name, each in slices.items()}
    misshapen = [
        f"{name} is {found[name]}, expected {shape}" for name, shape in expected.items() if found[name] != shape
    ]
    if misshapen:
        raise UsageError(f"{folder} has {len(misshapen)} misshapen tensors: {listed(misshapen)}")


def listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
