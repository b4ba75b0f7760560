"""A model folder as a checkpoint has it: configuration, random weights, and the byte tokenizer."""

import json
from pathlib import Path

import torch

from stepsaver.engine.models.config import parse_config
from stepsaver.engine.models.load import random_model, save_weights
from tests.conftest import sharpened
from tests.evaluation.byte_tokenizer import END_ID, VOCABULARY, write_byte_tokenizer

CONFIG = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bd_size": 8,
    "eos_token_id": END_ID,
    "bos_token_id": END_ID,
}


def write_model_folder(folder: Path) -> Path:
    """The mask id stands in the tokenizer's files only, as in the published checkpoints."""
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    model = sharpened(random_model(parse_config(CONFIG, {}), dtype=torch.float32, seed=1))
    save_weights(model, folder / "model.safetensors", dtype=torch.float32)
    return folder
