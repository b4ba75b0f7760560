"""Models with a file that is not as it should be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from stepsaver.engine.models.config import FIELDS
from tests.fuzz.damage import as_json
from tests.fuzz.files import damaged, documents
from tests.fuzz.words import TEMPLATES
from tests.fuzz.workspace import WITH_MODEL, Case

CHECKPOINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)
# What stands in files that the workspace's model does without.
OTHERWISE = {
    "generation_config.json": {"eos_token_id": 1, "bos_token_id": [1]},
    "added_tokens.json": {"|<MASK>|": 0},
    "special_tokens_map.json": {"eos_token": "<|end|>", "mask_token": {"content": "|<MASK>|"}},
    "model.safetensors.index.json": {"weight_map": {"model.norm.weight": "model.safetensors"}},
}
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@st.composite
def checkpoint_cases(draw: st.DrawFn, workspace: Path) -> Case:
    """A model one of whose files is spoiled."""
    name = draw(st.sampled_from([*CHECKPOINT_FILES, *["config.json"] * 6]))
    path = workspace / "model" / name
    content = path.read_bytes() if path.exists() else as_json(OTHERWISE[name])
    if name == "chat_template.jinja":
        new: Any = draw(st.sampled_from(TEMPLATES)).encode() if draw(st.booleans()) else draw(damaged(content))
    elif name == "model.safetensors":
        new = draw(damaged(content) | st.just(b"") if draw(st.booleans()) else _weights(path))
    else:
        new = draw(documents(content, _config_fields() if name == "config.json" else {}))
    return Case(list(draw(st.sampled_from(WITH_MODEL))), {f"model/{name}": new})


def _config_fields() -> dict[str, Any]:
    """Every field that is read of a configuration, with a value that may stand there."""
    return dict.fromkeys(FIELDS, 1) | {"rope_scaling": ROPE, "rope_parameters": ROPE}


@st.composite
def _weights(draw: st.DrawFn, path: Path) -> bytes:
    """Tensors of other types, shapes and values."""
    tensors = load_file(path)
    name = draw(st.sampled_from(sorted(tensors)))
    change: Callable[[torch.Tensor], torch.Tensor] = draw(
        st.sampled_from(
            [
                lambda t: t.to(torch.int64),
                lambda t: t.bool(),
                lambda t: t.to(torch.float8_e4m3fn),
                lambda t: t.half(),
                lambda t: t.double(),
                lambda t: t[:1].clone(),
                lambda t: t.flatten(),
                lambda t: t[:0],
                lambda t: t * torch.nan,
                lambda t: t * torch.inf,
                lambda t: t * 0,
                lambda t: torch.tensor(1.0),
            ]
        )
    )
    tensors[name] = change(tensors[name]).contiguous()
    return save(tensors)
