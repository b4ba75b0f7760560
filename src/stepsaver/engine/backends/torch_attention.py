"""Attention by torch's fused kernel: one sample as it is, several padded together.

The query heads that share a key-value head are folded into rows. H query heads, K key-value heads, E head dimension, R
rows of a sample, L rows of context, S samples, N packed rows.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.backends.packed import Alone, Attending, Mask, PaddedGroup

if TYPE_CHECKING:
    from stepsaver.engine.backends.backend import Backend
    from stepsaver.engine.cache import KeyValueCache


def attend(
    queries_NHE: Tensor, cache: "KeyValueCache", layer: int, attending: Attending, out: Tensor | None = None
) -> Tensor:
    """The mixed values [N, H E] of all queries but those in segments; they go into `out`, if it is given."""
    parts = [attend_one(queries_NHE[each.queries], cache, layer, each) for each in attending.alone]
    for group in attending.grouped:
        chosen = queries_NHE if group.chosen is None else queries_NHE[group.chosen]
        parts.append(attend_padded(chosen, cache, layer, group))
    mixed = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
    if attending.taken is not None:
        mixed = mixed[attending.taken]
    if out is None or attending.rows is None:
        return mixed
    return out.index_copy_(0, attending.rows, mixed)


def attend_one(queries_RHE: Tensor, cache: "KeyValueCache", layer: int, sample: Alone) -> Tensor:
    """One sample. On a CPU torch's fused kernel shares the key-value heads itself, which saves folding the queries."""
    keys, values = cache.read(layer, slice(sample.slot, sample.slot + 1), sample.length)
    sharing = queries_RHE.shape[1] // keys.shape[1]
    if cache.device.type != "cpu":
        return attend_folded(queries_RHE, keys, values, sample.mask, cache.backend)
    queries = queries_RHE.transpose(0, 1).unsqueeze(0)
    mask = None if sample.mask is None else sample.mask.of_queries()
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=sharing > 1)
    return mixed[0].transpose(0, 1)


def attend_folded(
    queries_NHE: Tensor, keys: Tensor, values: Tensor, mask: Mask | None, backend: "Backend", samples: int = 1
) -> Tensor:
    """Heads that share keys and values are more rows: GPUs before compute capability 8.0 have no fused kernel that
    shares them, and torch would repeat keys and values for every head.
    """
    rows, heads, _ = queries_NHE.shape
    kv_heads = keys.shape[1]
    folded = _fold(queries_NHE, samples=samples, kv_heads=kv_heads)
    added = None if mask is None else mask.folded(kv_heads, heads // kv_heads, rows // samples)
    return _unfold(backend.mix(folded, keys, values, added), heads=heads)


def attend_padded(queries_NHE: Tensor, cache: "KeyValueCache", layer: int, group: PaddedGroup) -> Tensor:
    """One call for several samples, `rows` queries each."""
    keys, values = cache.read(layer, group.slots, group.length)
    return attend_folded(queries_NHE, keys, values, group.mask, cache.backend, group.samples)


def _fold(queries_NHE: Tensor, *, samples: int, kv_heads: int) -> Tensor:
    """[S, K, H / K * R, E]: the query heads of a key-value head, one after the other."""
    _, heads, width = queries_NHE.shape
    split = queries_NHE.view(samples, -1, kv_heads, heads // kv_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(samples, kv_heads, -1, width)


def _unfold(mixed_SKRE: Tensor, *, heads: int) -> Tensor:
    """The reverse: [S * R, H, E]."""
    samples, kv_heads, _, width = mixed_SKRE.shape
    split = mixed_SKRE.view(samples, kv_heads, heads // kv_heads, -1, width)
    return split.permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
