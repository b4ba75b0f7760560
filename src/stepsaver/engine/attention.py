"""Mixing: every row of a block sees the whole context before it and all rows of its block.

Inside a block nothing is masked, so a sample needs no mask at all: its queries meet exactly the rows it may see, as a
view of the cache. Query heads that share a key-value head are folded into rows, which makes grouped-query attention a
plain one without copying keys. Samples are attended one by one: their contexts differ in length, and one call per
sample costs less than padding and masking all of them (docs/speed.md has the figures).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.cache import KeyValueCache


class Segment(NamedTuple):
    """One sample's part of the packed queries, and what they see."""

    start: int
    stop: int
    slot: int
    length: int  # rows of context, the block included
    mask: Tensor | None  # [queries, length], only for a prefill of several blocks


def attend(queries_NHE: Tensor, cache: KeyValueCache, layer: int, segments: tuple[Segment, ...]) -> Tensor:
    if len(segments) == 1:
        _, _, slot, length, mask = segments[0]
        return _attend_one(queries_NHE, *cache.read(layer, slot, length), mask)
    mixed_NHE = torch.empty_like(queries_NHE)
    for start, stop, slot, length, mask in segments:
        mixed_NHE[start:stop] = _attend_one(queries_NHE[start:stop], *cache.read(layer, slot, length), mask)
    return mixed_NHE


def _attend_one(queries_RHE: Tensor, keys_LKE: Tensor, values_LKE: Tensor, mask: Tensor | None) -> Tensor:
    rows, heads, width = queries_RHE.shape
    kv_heads = keys_LKE.shape[1]
    group = heads // kv_heads
    queries = queries_RHE.view(rows, kv_heads, group, width).permute(1, 2, 0, 3)  # [K, group, R, E]
    keys, values = keys_LKE.transpose(0, 1).unsqueeze(1), values_LKE.transpose(0, 1).unsqueeze(1)  # [K, 1, L, E]
    if mask is None:
        queries = queries.reshape(kv_heads, 1, group * rows, width)
        mixed = F.scaled_dot_product_attention(queries, keys, values).view(kv_heads, group, rows, width)
    else:
        shape = (kv_heads, group, keys.shape[2], width)
        mixed = F.scaled_dot_product_attention(queries, keys.expand(shape), values.expand(shape), attn_mask=mask)
    return mixed.permute(2, 0, 1, 3).reshape(rows, heads, width)


def block_causal_mask(start: int, rows: int, *, block_size: int, device: torch.device) -> Tensor:
    """[rows, start + rows]: row q sees row k iff q // block_size >= k // block_size."""
    keys = torch.arange(start + rows, device=device) // block_size
    return keys[start:, None] >= keys[None, :]
