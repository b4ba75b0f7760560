"""The registry of architectures: what a checkpoint's `architectures` entry means for our one network."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from stepsaver.engine.defaults import DECODE, DEFAULT_POLICY
from stepsaver.engine.errors import unknown_name
from stepsaver.engine.plugins import load_plugin, plugin_names, plugin_problem
from stepsaver.engine.positions import Predicts

GROUP = "stepsaver.architectures"


@dataclass(frozen=True)
class Architecture:
    """How checkpoints of one architecture differ from the rest of the family, and among each other."""

    name: str  # the entry of `architectures` in config.json
    attention_bias: bool | None  # whether q, k and v have a bias; None: config.json decides (`attention_bias`)
    output_bias: bool  # whether the attention's output projection has a bias too if q, k and v have one
    mask_id: int | None  # the mask token if neither config nor tokenizer names one
    block_size: int | None  # if config.json names none; None: it differs from checkpoint to checkpoint
    predicts: Predicts = "next"  # what the logits of a row predict: the token after it, its own, or `both`
    head_norms: bool = False  # whether each head's queries and keys are normed before they are rotated
    sub_block_size: int | None = None  # rows of a block that are decoded together; None: all
    decode: str = DECODE  # how its authors decode it, and we do if nothing else is asked for
    policy: str = DEFAULT_POLICY  # of its own decoder, and of ours if no other is asked for
    # What config.json calls an entry, and the weights call a module, where these are not Llama's names in transformers.
    entries: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    expects: Mapping[str, Any] = field(default_factory=dict)  # entries of config.json that may have this value only

    def qkv_bias(self, config: Mapping[str, Any]) -> bool:
        return bool(config.get("attention_bias", False)) if self.attention_bias is None else self.attention_bias


def architectures() -> dict[str, Architecture]:
    """All architectures by name: the files of this folder, and other packages' entry points."""
    return _own() | {name: _plugin(name) for name in sorted(plugin_names(GROUP))}


def architecture_named(name: str) -> Architecture:
    others = plugin_names(GROUP)
    if name in others:
        return _plugin(name)
    known = _own()
    if name not in known:
        raise unknown_name("architecture", name, known.keys() | others)
    return known[name]


@cache
def _own() -> dict[str, Architecture]:
    package = import_module("stepsaver.engine.models")
    found = (import_module(f"{package.__name__}.{module.name}") for module in iter_modules(package.__path__))
    return {module.ARCHITECTURE.name: module.ARCHITECTURE for module in found if hasattr(module, "ARCHITECTURE")}


def _plugin(name: str) -> Architecture:
    made = load_plugin(GROUP, name, own=_own())
    if not isinstance(made, Architecture) or made.name != name:
        raise plugin_problem(GROUP, name, f"an Architecture with the name {name!r}")
    return made
