"""A draft adapter: low-rank maps beside the attention's output projections, on while drafting and off while verifying.

Read from PEFT's layout. Whatever else an adapter may be in it is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.models.config import ModelConfig, read_json
from stepsaver.engine.models.fields import Field, Real, Whole, read_fields
from stepsaver.engine.models.load import FLOATS, listed, open_tensors, output_modules

FIELDS: dict[str, Field] = {"r": Whole(1, 1 << 17), "lora_alpha": Real(0, 1e6)}
# What an adapter has to be, beside a rank and an alpha. Where an entry says nothing, it is.
EXPECTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "target_modules": (["o_proj"], "o_proj"),
    "bias": ("none",),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({},)),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication", "exclude_modules"), ([],)),
}


@dataclass(frozen=True)
class DraftAdapter:
    down: tuple[Tensor, ...]  # per layer [rank, heads x head dimension]
    up: tuple[Tensor, ...]  # per layer [hidden, rank], scaled

    def add(self, layer: int, mixed: Tensor, delta: Tensor, drafting: Tensor) -> None:
        """Adds to an attention's delta what the adapter makes of mixed values. `drafting` is 0 where nobody drafts."""
        delta += (mixed @ self.down[layer].T * drafting) @ self.up[layer].T


def read_adapter(folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> DraftAdapter:
    """The adapter of a folder. Its entries, names and shapes are checked before any number is read."""
    if not folder.is_dir():
        raise UsageError(f"no adapter folder at {folder}")
    entries = read_json(folder / "adapter_config.json", required=True)
    for name, expected in EXPECTED.items():
        if entries.get(name) is not None and entries[name] not in expected:
            raise UsageError(f"{folder / 'adapter_config.json'}: {name} {shown(entries[name])} is not supported")
    given = read_fields(entries, FIELDS)
    if missing := FIELDS.keys() - given.keys():
        raise UsageError(f"{folder / 'adapter_config.json'} has no entry {min(missing)!r}")
    rank, width = given["r"], config.heads * config.head_dim
    modules = [f"base_model.model.{module}" for module in output_modules(config)]
    shapes = {f"{module}.lora_A.weight": (rank, width) for module in modules}
    shapes |= {f"{module}.lora_B.weight": (config.hidden, rank) for module in modules}
    path = folder / "adapter_model.safetensors"
    if not path.exists():
        raise UsageError(f"{folder} has no {path.name}")
    tensors = open_tensors(path)
    found = set(tensors.keys())
    for names, problem in ((shapes.keys() - found, "lacks"), (found - shapes.keys(), "has further tensors:")):
        if names:
            raise UsageError(f"{path} {problem} {listed(names)}")
    for name, shape in shapes.items():
        stored = tensors.get_slice(name)
        if tuple(stored.get_shape()) != shape or stored.get_dtype() not in FLOATS:
            raise UsageError(
                f"{path}: {name} is {stored.get_dtype()} {tuple(stored.get_shape())}, expected floats of shape {shape}"
            )

    def read(kind: str, scale: float) -> Iterable[Tensor]:
        return (scale * tensors.get_tensor(f"{module}.{kind}.weight").to(device, dtype) for module in modules)

    return DraftAdapter(tuple(read("lora_A", 1.0)), tuple(read("lora_B", given["lora_alpha"] / rank)))
