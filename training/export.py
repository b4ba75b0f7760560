"""A checkpoint folder from a training: what the engine, transformers and the harness expect to find."""

import json
from pathlib import Path

import torch

from stepsaver.engine.models.load import save_weights
from stepsaver.engine.models.transformer import Transformer
from training.problems.tokenizer import END_ID, MASK_ID, write_tokenizer

STORED_DTYPE = torch.float16  # the weights are small; its mantissa is three bits longer than bfloat16's


def export_checkpoint(model: Transformer, folder: Path) -> None:
    """Writes weights, configuration, tokenizer and chat template in the Fast_dLLM_Qwen format."""
    write_tokenizer(folder)
    save_weights(model, folder / "model.safetensors", dtype=STORED_DTYPE)
    config = model.config
    described = {
        "architectures": [config.architecture],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": config.block_size,
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "pad_token_id": END_ID,
        "eos_token_id": END_ID,
        "bos_token_id": None,
        "mask_token_id": MASK_ID,
        "torch_dtype": str(STORED_DTYPE).removeprefix("torch."),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    generation = {"eos_token_id": END_ID, "pad_token_id": END_ID, "do_sample": False, "max_new_tokens": 96}
    for name, content in (("config.json", described), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
