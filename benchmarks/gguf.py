"""Writes models with random weights in llama.cpp's format (GGUF 3): enough to run a shape, without a tokenizer."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch

from stepsaver.engine.models.config import ModelConfig

ALIGNMENT = 32
UINT32, FLOAT32, STRING = 4, 6, 8  # kinds of values
TENSOR_KINDS = {torch.float32: 0, torch.float16: 1}
ARCHITECTURE = "qwen2"  # queries, keys and values with a bias, as in our shapes


class TensorPlan(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outputs, inputs
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    return struct.pack("<II", UINT32, value) if isinstance(value, int) else struct.pack("<If", FLOAT32, value)


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def facts(config: ModelConfig) -> dict[str, str | int | float]:
    of_shape: dict[str, int | float] = {
        "block_count": config.layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden,
        "feed_forward_length": config.mlp,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab,
    }
    return {
        "general.architecture": ARCHITECTURE,
        "tokenizer.ggml.model": "none",
        **{f"{ARCHITECTURE}.{name}": value for name, value in of_shape.items()},
    }


def tensors(config: ModelConfig, dtype: torch.dtype) -> Iterator[TensorPlan]:
    """Yields the tensors of a model: maps in `dtype`, vectors in float32."""
    queries, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    yield TensorPlan("token_embd.weight", (config.vocab, config.hidden), dtype)
    for layer in range(config.layers):
        maps = {
            "attn_q": (queries, config.hidden),
            "attn_k": (kv, config.hidden),
            "attn_v": (kv, config.hidden),
            "attn_output": (config.hidden, queries),
            "ffn_gate": (config.mlp, config.hidden),
            "ffn_up": (config.mlp, config.hidden),
            "ffn_down": (config.hidden, config.mlp),
        }
        for name, shape in maps.items():
            yield TensorPlan(f"blk.{layer}.{name}.weight", shape, dtype)
        for name in ("attn_q", "attn_k", "attn_v"):
            yield TensorPlan(f"blk.{layer}.{name}.bias", maps[name][:1], torch.float32)
        for name in ("attn_norm", "ffn_norm"):
            yield TensorPlan(f"blk.{layer}.{name}.weight", (config.hidden,), torch.float32)
    yield TensorPlan("output_norm.weight", (config.hidden,), torch.float32)
    if not config.tied:
        yield TensorPlan("output.weight", (config.vocab, config.hidden), dtype)


def write_random(config: ModelConfig, path: Path, dtype: torch.dtype = torch.float16) -> None:
    """Writes a model of the given shape, tensor by tensor."""
    assert config.qkv_bias, "the architecture that is written has biases"
    planned = list(tensors(config, dtype))
    with path.open("wb") as file:
        _write_header(file, config, planned)
        file.write(bytes(_padding(file.tell())))
        generator = torch.Generator().manual_seed(0)
        for plan in planned:
            numbers = torch.empty(plan.shape).normal_(0.0, 0.02, generator=generator)
            if "norm" in plan.name:
                numbers.fill_(1.0)
            numbers.to(plan.dtype).numpy().tofile(file)
            file.write(bytes(_padding(plan.size)))


def _write_header(file: BinaryIO, config: ModelConfig, planned: list[TensorPlan]) -> None:
    values = facts(config)
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(planned), len(values)))
    for name, value in values.items():
        file.write(_text(name) + _value(value))
    offset = 0
    for plan in planned:
        sizes = struct.pack(f"<I{len(plan.shape)}Q", len(plan.shape), *reversed(plan.shape))
        file.write(_text(plan.name) + sizes + struct.pack("<IQ", TENSOR_KINDS[plan.dtype], offset))
        offset += plan.size + _padding(plan.size)
