"""Nemotron-Labs-Diffusion (NVIDIA, 2026): Ministral 3, decoding token by token, by block diffusion or by drafts."""

from stepsaver.engine.models.architecture import Architecture

ARCHITECTURE = Architecture(
    name="NemotronLabsDiffusionModel",
    attention_bias=False,
    output_bias=False,
    mask_id=None,
    block_size=None,
    predicts="both",
    decode="speculative",
    policy="threshold:strict=false",
    modules={
        "model.embed_tokens": "encoder.embed_tokens",
        "model.layers": "encoder.layers",
        "model.norm": "encoder.norm",
        "lm_head": "diffusion_head",
    },
    expects={"dlm_paradigm": "bidirectional", "sliding_window": None},
)
