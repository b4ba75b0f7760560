"""Checkpoint folders: reading one into the network and writing one. Safetensors only; no checkpoint's code runs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.config import ModelConfig, read_config
from stepsaver.engine.models.transformer import Transformer

# Our modules and the checkpoint's modules whose rows they stack.
LAYER_MODULES = {
    "attention.norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.head_norms": ("self_attn.q_norm", "self_attn.k_norm"),
    "mlp.norm": ("post_attention_layernorm",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
OUTER_MODULES = {"embedding": ("model.embed_tokens",), "norm": ("model.norm",), "head": ("lm_head",)}
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)  # buffers of old exports, computed here


class StoredTensor(NamedTuple):
    """A tensor of the checkpoint and the rows of our parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    rows: slice


def stored_tensors(model: Transformer) -> dict[str, tuple[StoredTensor, ...]]:
    """For each parameter of the network, the checkpoint's tensors that it is made of."""
    return {name: tuple(_stored(name, p.shape, model.config)) for name, p in model.named_parameters()}


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Transformer:
    """The network with the folder's weights. Names and shapes are checked before a weight is read."""
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    wanted = stored_tensors(model)
    files = _files_by_tensor(folder)
    _check(folder, files, wanted, tied=config.tied)
    model = model.to_empty(device=device)
    if config.tied:  # to_empty gave the head a storage of its own
        model.head.weight = model.embedding.weight
    handles = {path: _open(path) for path in set(files.values())}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for stored in wanted[name]:
                parameter[stored.rows].copy_(handles[files[stored.name]].get_tensor(stored.name))
    return model.prepare()


def save_weights(model: Transformer, path: Path, *, dtype: torch.dtype) -> None:
    """Writes the weights under the checkpoint format's names: beside first, then renamed."""
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
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
) -> Transformer:
    """A model of the given shape with random weights, for speed measurements and tests."""
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model.to(device, dtype).prepare()


def _stored(name: str, shape: torch.Size, config: ModelConfig) -> Iterable[StoredTensor]:
    module, attribute = name.rsplit(".", 1)
    prefix = ""
    sources: tuple[str, ...] = OUTER_MODULES.get(module, ())
    if not sources:
        _, index, inner = module.split(".", 2)
        prefix, sources = f"model.layers.{index}.", LAYER_MODULES[inner]
    start = 0
    for source, rows in zip(sources, _stacked_rows(module, shape[0], config), strict=True):
        yield StoredTensor(f"{prefix}{source}.{attribute}", (rows, *shape[1:]), slice(start, start + rows))
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


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{index} is not a weight index: {error!r}") from None
        paths = [folder / shard for shard in shards]
        if any(path.parent != folder for path in paths):
            raise UsageError(f"{index} names files outside its folder")
    elif (folder / "model.safetensors").exists():
        paths = [folder / "model.safetensors"]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    absent = [path.name for path in paths if not path.exists()]
    if absent or not paths:
        raise UsageError(f"{folder} has no {', '.join(absent) or '*.safetensors file'}")
    return {name: path for path in paths for name in _open(path).keys()}  # noqa: SIM118 (not a dict)


def _open(path: Path) -> "safe_open":
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged or cut short: {error}") from None


def _check(folder: Path, files: dict[str, Path], wanted: dict[str, tuple[StoredTensor, ...]], *, tied: bool) -> None:
    expected = {stored.name: stored.shape for parts in wanted.values() for stored in parts}
    missing = expected.keys() - files.keys()
    if missing:
        raise UsageError(f"{folder} lacks {len(missing)} tensors: {_listed(missing)}")
    surplus = {name for name in files.keys() - expected.keys() if not name.endswith(IGNORED_ENDINGS)}
    surplus -= {"lm_head.weight"} if tied else set()
    if surplus:
        raise UsageError(f"{folder} has {len(surplus)} tensors that its architecture does not know: {_listed(surplus)}")
    handles = {path: _open(path) for path in set(files.values())}
    found = {name: tuple(handles[files[name]].get_slice(name).get_shape()) for name in expected}
    misshapen = [
        f"{name} is {found[name]}, expected {shape}" for name, shape in expected.items() if found[name] != shape
    ]
    if misshapen:
        raise UsageError(f"{folder} has {len(misshapen)} misshapen tensors: {_listed(misshapen)}")


def _listed(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")
