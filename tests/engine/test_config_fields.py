"""config.json is parsed, not trusted: every field that is read has a kind and a range."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.config import FIELDS, parse_config, read_config
from stepsaver.engine.models.load import load_model
from tests.conftest import GOLDEN
from tests.evaluation.tiny_folder import CONFIG
from tests.fuzz.damage import VALUES

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": "x"}, "hidden_size 'x' is not a whole number from 1"),
    ({"num_attention_heads": 0}, "num_attention_heads 0 is not"),
    ({"num_attention_heads": True}, "num_attention_heads True is not"),
    ({"mask_token_id": "x"}, "mask_token_id 'x' is not"),
    ({"rope_scaling": 5}, "rope_scaling 5 is not an object"),
    ({"architectures": [None]}, r"architectures \[None\] is not a list"),
    ({"vocab_size": 1.5}, "vocab_size 1.5 is not"),
    ({"rope_theta": 0}, "rope_theta 0 is not a number above 0"),
    ({"rope_theta": ""}, "rope_theta '' is not"),
    ({"rope_theta": 10**400}, "rope_theta a number of too many digits is not"),
    ({"max_position_embeddings": float("nan")}, "max_position_embeddings nan is not"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 is not"),
    ({"bd_size": 10**6}, "bd_size 1000000 is not"),
    ({"head_dim": 3}, "heads of 3 dimensions"),
    ({"num_attention_heads": 4096, "num_key_value_heads": None}, "heads of 0 dimensions"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes' is not true or false"),
    ({"rope_scaling": LLAMA3 | {"factor": 0}}, "factor 0 is not"),
    ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "low_freq_factor 1.0 is not below"),
    ({"rope_scaling": {"rope_type": 5}}, "rope_type 5 is not a text"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(list(changes.items()))[:60] for changes, _ in WRONG])
def test_impossible_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config(CONFIG | changes, {})


@given(st.sampled_from(sorted(FIELDS)), st.sampled_from(VALUES))
def test_whatever_stands_in_a_field_is_taken_or_refused(name: str, value: Any) -> None:
    """And what is taken is of the kind that the network expects."""
    try:
        config = parse_config(CONFIG | {name: value}, {})
    except (UsageError, KeyError):
        return
    sizes = (config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.mlp, config.vocab)
    assert all(type(size) is int and size > 0 for size in sizes)
    assert config.rope.theta > 0


def test_null_counts_as_left_out() -> None:
    assert parse_config(CONFIG | dict.fromkeys(("head_dim", "rope_scaling", "mask_token_id")), {}) == parse_config(
        CONFIG, {}
    )


@pytest.mark.parametrize("content", ["[" * 100_000, "\ufeff{", "[1]", "{'a': 1}"])
def test_what_is_no_object_is_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.uint8])
def test_weights_that_are_no_numbers_with_a_point_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(kind)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match=r"1 tensors that are not of F16, BF16, F32, F64: model.norm.weight is"):
        load_model(folder, dtype=torch.float32)


def test_sizes_are_compared_with_the_headers_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 1 << 24, "intermediate_size": 1 << 20}))
    monkeypatch.setattr("torch.nn.Module.to_empty", None)
    with pytest.raises(UsageError, match="misshapen"):
        load_model(folder, dtype=torch.float32)
