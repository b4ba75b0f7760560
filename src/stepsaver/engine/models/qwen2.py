"""Qwen2 and Qwen2.5: with blocks of one row this is plain autoregressive decoding, the baseline on the same engine."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(name="Qwen2ForCausalLM", attention_bias=True, output_bias=False, mask_id=None, block_size=1)
