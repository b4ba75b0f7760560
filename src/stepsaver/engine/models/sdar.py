"""SDAR (Cheng et al., 2025): Qwen3 adapted to block diffusion. Each row predicts its own token; no sub-blocks."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(
    name="SDARForCausalLM",
    attention_bias=False,
    output_bias=False,
    mask_id=None,
    block_size=None,
    predicts="self",
    head_norms=True,
    policy="quota:threshold=0.85",
)
