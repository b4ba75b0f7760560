"""Shapes of real models, for speed measurements with random weights."""

from stepsaver.engine.models.config import ModelConfig
from stepsaver.engine.models.fast_dllm_qwen import ARCHITECTURE
from stepsaver.engine.models.rope import Rope


def _shape(
    *, layers: int, hidden: int, heads: int, kv_heads: int, mlp: int, vocab: int, tied: bool = True
) -> ModelConfig:
    return ModelConfig(
        architecture=ARCHITECTURE.name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        mlp=mlp,
        vocab=vocab,
        rope=Rope(theta=1e6),
        max_positions=8192,
        tied=tied,
        qkv_bias=True,
        block_size=ARCHITECTURE.block_size,
        mask_id=1,
        bos_id=3,
    )


SHAPES = {
    "135M": _shape(layers=30, hidden=576, heads=9, kv_heads=3, mlp=1536, vocab=49152),
    "0.5B": _shape(layers=24, hidden=896, heads=14, kv_heads=2, mlp=4864, vocab=151936),
    "1.5B": _shape(layers=28, hidden=1536, heads=12, kv_heads=2, mlp=8960, vocab=151936),
    "7B": _shape(layers=28, hidden=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064, tied=False),
}
