"""`config.json` of a checkpoint folder, checked and reduced to what the network and the decoder need."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.architecture import Architecture, architecture_named
from stepsaver.engine.models.rope import Rope, parse_rope
from stepsaver.engine.prediction import Predicts


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    rope: Rope
    max_positions: int
    norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    predicts: Predicts = "next"
    block_size: int | None = None  # None: whoever decodes has to say it
    mask_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    stored_dtype: str = "float32"


def read_config(folder: Path) -> ModelConfig:
    """The checkpoint's configuration. Special ids that it leaves open are None or empty; the caller may set them."""
    if not folder.is_dir():
        raise UsageError(f"no model folder at {folder}")
    config = read_json(folder / "config.json", required=True)
    generation = read_json(folder / "generation_config.json")
    try:
        return parse_config(config, generation)
    except KeyError as missing:
        raise UsageError(f"{folder / 'config.json'} has no entry {missing}") from None
    except UsageError as error:
        raise UsageError(f"{folder / 'config.json'}: {error}") from None


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    names = config.get("architectures") or []
    if len(names) != 1:
        raise UsageError(f"architectures is {names!r}, expected exactly one name")
    architecture = architecture_named(names[0])
    if config.get("hidden_act", "silu") != "silu":
        raise UsageError(f"hidden_act {config['hidden_act']!r} is not supported, only 'silu'")
    if config.get("use_sliding_window"):
        raise UsageError("sliding-window attention is not supported")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    qkv_bias = architecture.qkv_bias(config)
    return ModelConfig(
        architecture=architecture.name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp=config["intermediate_size"],
        vocab=config["vocab_size"],
        rope=parse_rope(config),
        max_positions=config["max_position_embeddings"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        output_bias=qkv_bias and architecture.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        head_norms=architecture.head_norms,
        predicts=architecture.predicts,
        block_size=_block_size(config, architecture),
        mask_id=config.get("mask_token_id"),
        stop_ids=_ids(generation.get("eos_token_id", config.get("eos_token_id"))),
        bos_id=_first(config.get("bos_token_id", generation.get("bos_token_id"))),
        stored_dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


def _block_size(config: Mapping[str, Any], architecture: Architecture) -> int | None:
    named = {name: config[name] for name in ("bd_size", "block_size") if config.get(name) is not None}
    for name, size in named.items():
        if not isinstance(size, int):
            raise UsageError(f"{name} {size!r} is not a whole number")
    if len(set(named.values())) > 1:
        raise UsageError(
            f"bd_size {named['bd_size']} and block_size {named['block_size']} differ; one of them is wrong"
        )
    return next(iter(named.values()), architecture.block_size)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _first(value: int | list[int] | None) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """An object from one of a checkpoint's files; an empty one if the file is not there and need not be."""
    if not path.exists():
        if required:
            raise UsageError(f"{path.parent} has no {path.name}")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__}, expected an object")
    return content
