"""`config.json` of a checkpoint folder, checked and reduced to what the network and the decoder need."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepsaver.engine.arguments import MOST_BLOCK_ROWS
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.architecture import Architecture, architecture_named
from stepsaver.engine.models.fields import Entries, Field, Flag, Many, OneOrMany, Real, Whole, Word, read_fields
from stepsaver.engine.models.rope import Rope, parse_rope
from stepsaver.engine.positions import Predicts

MOST_BYTES = 1 << 28  # of a file that is read whole; the largest tokenizers have a tenth of it
TOKEN = Whole(0, 1 << 24)
# Every field of config.json that we read. The ranges end well above the largest existing models.
FIELDS: dict[str, Field] = {
    "architectures": Many(Word()),
    "hidden_act": Word(),
    "use_sliding_window": Flag(),
    "layer_types": Many(Word()),
    "num_hidden_layers": Whole(1, 1024),
    "hidden_size": Whole(1, 1 << 17),
    "num_attention_heads": Whole(1, 1 << 12),
    "num_key_value_heads": Whole(1, 1 << 12),
    "head_dim": Whole(2, 1 << 12),
    "intermediate_size": Whole(1, 1 << 20),
    "vocab_size": Whole(1, 1 << 24),
    "max_position_embeddings": Whole(1, 1 << 27),
    "rms_norm_eps": Real(0, 1),
    "tie_word_embeddings": Flag(),
    "attention_bias": Flag(),
    "mlp_bias": Flag(),
    "bd_size": Whole(1, MOST_BLOCK_ROWS),
    "block_size": Whole(1, MOST_BLOCK_ROWS),
    "mask_token_id": TOKEN,
    "eos_token_id": OneOrMany(TOKEN),
    "bos_token_id": OneOrMany(TOKEN),
    "dtype": Word(),
    "torch_dtype": Word(),
    "rope_theta": Real(0, 1e15),
    "rope_scaling": Entries(),
    "rope_parameters": Entries(),
}
GENERATION_FIELDS = {name: FIELDS[name] for name in ("eos_token_id", "bos_token_id")}


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
    block_size: int | None = None  # None: the caller has to give it
    mask_id: int | None = None
    stop_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    stored_dtype: str = "float32"


def read_config(folder: Path) -> ModelConfig:
    """The checkpoint's configuration. Special ids that it does not name are None or empty; the caller may set them."""
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
    architecture = _architecture(config)
    given = read_fields(config, {architecture.entries.get(name, name): field for name, field in FIELDS.items()})
    given |= {name: given[entry] for name, entry in architecture.entries.items() if entry in given}
    _check_served(config, given, architecture)
    generated = read_fields(generation, GENERATION_FIELDS)
    heads = given["num_attention_heads"]
    kv_heads = given.get("num_key_value_heads", heads)
    if heads % kv_heads:
        raise UsageError(f"{heads} attention heads cannot share {kv_heads} key-value heads")
    qkv_bias = architecture.qkv_bias(given)
    return ModelConfig(
        architecture=architecture.name,
        layers=given["num_hidden_layers"],
        hidden=given["hidden_size"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(given),
        mlp=given["intermediate_size"],
        vocab=given["vocab_size"],
        rope=parse_rope(given),
        max_positions=given["max_position_embeddings"],
        norm_eps=given.get("rms_norm_eps", 1e-6),
        tied=given.get("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=qkv_bias and architecture.output_bias,
        mlp_bias=given.get("mlp_bias", False),
        head_norms=architecture.head_norms,
        predicts=architecture.predicts,
        block_size=_block_size(given, architecture),
        mask_id=given.get("mask_token_id"),
        stop_ids=_ids(generated.get("eos_token_id", given.get("eos_token_id"))),
        bos_id=next(iter(_ids(given.get("bos_token_id", generated.get("bos_token_id")))), None),
        stored_dtype=given.get("dtype") or given.get("torch_dtype") or "float32",
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = read_fields(config, {"architectures": FIELDS["architectures"]}).get("architectures", [])
    if len(names) != 1:
        raise UsageError(f"architectures is {shown(names)}, expected exactly one name")
    return architecture_named(names[0])


def _check_served(config: Mapping[str, Any], given: Mapping[str, Any], architecture: Architecture) -> None:
    """Refuses a checkpoint that needs something the network does not have."""
    if given.get("hidden_act", "silu") != "silu":
        raise UsageError(f"hidden_act {shown(given['hidden_act'])} is not supported, only 'silu'")
    if given.get("use_sliding_window"):
        raise UsageError("sliding-window attention is not supported")
    unknown = next((kind for kind in given.get("layer_types", []) if kind != "full_attention"), None)
    if unknown is not None:
        raise UsageError(f"layer_types has {shown(unknown)}, and only 'full_attention' is supported")
    for name, expected in architecture.expects.items():
        if config.get(name) not in (None, expected):
            raise UsageError(f"{name} {shown(config[name])} is not supported, only {json.dumps(expected)}")


def _head_dim(given: Mapping[str, Any]) -> int:
    dim = given.get("head_dim", given["hidden_size"] // given["num_attention_heads"])
    if dim < 1 or dim % 2:
        raise UsageError(f"heads of {dim} dimensions cannot be rotated in pairs")
    return dim


def _block_size(given: Mapping[str, Any], architecture: Architecture) -> int | None:
    named = {name: given[name] for name in ("bd_size", "block_size") if name in given}
    if len(set(named.values())) > 1:
        raise UsageError(
            f"bd_size {named['bd_size']} and block_size {named['block_size']} differ; one of them is wrong"
        )
    return next(iter(named.values()), architecture.block_size)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def is_there(path: Path, *, most: float = MOST_BYTES) -> bool:
    """Whether there is such a file of a checkpoint. Links are followed, as the hub's cache is made of them, but what
    they lead to is a file, not a device or a pipe that never ends, and not too large to be read whole.
    """
    if not path.exists():
        return False
    if not path.is_file():
        raise UsageError(f"{path} is not a file")
    if (size := path.stat().st_size) > most:
        raise UsageError(f"{path} has {size} bytes, more than {most}")
    return True


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The JSON object in one of a checkpoint's files; an empty one if the file is missing and not required."""
    if not is_there(path):
        if required:
            raise UsageError(f"{path.parent} has no {path.name}")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds {type(content).__name__}, expected an object")
    return content
