"""Fast-dLLM v2 (Wu et al., 2025): Qwen2.5 with blocks of 32, sub-blocks of 8 and the mask token `|<MASK>|`."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(
    name="Fast_dLLM_QwenForCausalLM",
    attention_bias=True,
    output_bias=False,
    mask_id=151665,
    block_size=32,
    sub_block_size=8,
)
