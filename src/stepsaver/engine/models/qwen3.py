"""Qwen3, the dense models: each head's queries and keys are normed; autoregressive, blocks of one row."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM", attention_bias=None, output_bias=True, mask_id=None, block_size=1, head_norms=True
)
