"""Mixing: every row of a block sees the whole context before it and all rows of its block.

Inside a block nothing is masked, so a sample needs no mask at all: its queries meet exactly the rows it may see, as a
view of the cache. Query heads that share a key-value head are folded into rows, which makes grouped-query attention a
plain one without copying keys. Samples are attended one by one where that is a calculation worth its call; where it is
not (small models, few rows) samples are attended together, padded and masked (docs/speed.md has the figures).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.cache import KeyValueCache

SMALL_CALL = 4e6  # operations of one sample's attention, below which calling costs more than calculating
FEW_ROWS = 16  # samples with so many rows at most are padded together, and those with more


class Segment(NamedTuple):
    """One sample's part of the packed queries, and what they see."""

    start: int
    stop: int
    slot: int
    length: int  # rows of context, the block included
    mask: Tensor | None  # [queries, length], only for a prefill of several blocks

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Together(NamedTuple):
    """Samples that are attended in one call: their queries padded to `rows`, their keys to `length`."""

    places: Tensor  # of their queries among the packed ones
    padded_places: Tensor  # and among the padded ones
    slots: Tensor | slice  # a slice: a view of the cache, places between the samples idle
    samples: int
    rows: int
    length: int
    mask: Tensor  # [samples, 1, 1, length], added to the scores


class Attending(NamedTuple):
    """How the queries of a forward are mixed."""

    alone: tuple[Segment, ...]
    together: tuple[Together, ...]


def plan_attending(segments: Sequence[Segment], *, width: int, dtype: torch.dtype, device: torch.device) -> Attending:
    """Decides who is attended alone; `width` is that of all query heads. On a GPU every call is a small one."""
    most = SMALL_CALL if device.type == "cpu" else float("inf")
    groups: dict[bool, list[Segment]] = {False: [], True: []}
    alone: list[Segment] = []
    for segment in segments:
        small = segment.mask is None and 4 * width * segment.rows * segment.length < most
        (groups[segment.rows > FEW_ROWS] if small else alone).append(segment)
    together = []
    for group in groups.values():
        if len(group) > 1:
            together.append(_together(group, dtype, device))
        else:
            alone += group
    return Attending(tuple(alone), tuple(together))


def _together(group: list[Segment], dtype: torch.dtype, device: torch.device) -> Together:
    rows = max(segment.rows for segment in group)
    length = max(segment.length for segment in group)
    slots = [segment.slot for segment in group]
    # a view of all slots up to the last costs no copy, and is worth it while most of them are in use
    is_view = 2 * len(slots) > max(slots)
    order = slots if is_view else list(range(len(slots)))
    count = max(slots) + 1 if is_view else len(slots)
    lengths = torch.zeros(count, dtype=torch.int64)
    lengths[order] = torch.tensor([segment.length for segment in group])
    mask = torch.zeros(count, 1, 1, length, dtype=dtype)
    mask.masked_fill_(torch.arange(length) >= lengths.clamp_min(1)[:, None, None, None], -torch.inf)
    places = torch.cat([torch.arange(segment.start, segment.stop) for segment in group])
    padded = [place * rows + torch.arange(each.rows) for place, each in zip(order, group, strict=True)]
    return Together(
        places=places.to(device, non_blocking=True),
        padded_places=torch.cat(padded).to(device, non_blocking=True),
        slots=slice(0, count) if is_view else torch.tensor(slots).to(device, non_blocking=True),
        samples=count,
        rows=rows,
        length=length,
        mask=mask.to(device, non_blocking=True),
    )


def attend(queries_NHE: Tensor, cache: KeyValueCache, layer: int, attending: Attending) -> Tensor:
    if len(attending.alone) == 1 and not attending.together:
        _, _, slot, length, mask = attending.alone[0]
        return _attend_one(queries_NHE, *cache.read(layer, slot, length), mask)
    mixed_NHE = torch.empty_like(queries_NHE)
    for start, stop, slot, length, mask in attending.alone:
        mixed_NHE[start:stop] = _attend_one(queries_NHE[start:stop], *cache.read(layer, slot, length), mask)
    for group in attending.together:
        mixed_NHE[group.places] = _attend_group(queries_NHE[group.places], cache, layer, group)
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


def _attend_group(queries_NHE: Tensor, cache: KeyValueCache, layer: int, group: Together) -> Tensor:
    """One call for several samples: [samples, K, group * rows, E] against [samples, K, length, E]."""
    _, heads, width = queries_NHE.shape
    keys, values = (each[group.slots, : group.length].transpose(1, 2) for each in cache.by_slot(layer))
    kv_heads = keys.shape[1]
    shared = heads // kv_heads
    padded = queries_NHE.new_zeros(group.samples * group.rows, heads, width)
    padded[group.padded_places] = queries_NHE
    queries = padded.view(group.samples, group.rows, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
    queries = queries.reshape(group.samples, kv_heads, shared * group.rows, width)
    mask = group.mask.expand(-1, -1, queries.shape[2], -1)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    mixed = mixed.view(group.samples, kv_heads, shared, group.rows, width).permute(0, 3, 1, 2, 4)
    return mixed.reshape(group.samples * group.rows, heads, width)[group.padded_places]


def block_causal_mask(start: int, rows: int, *, block_size: int, device: torch.device) -> Tensor:
    """[rows, start + rows]: row q sees row k iff q // block_size >= k // block_size."""
    keys = torch.arange(start + rows, device=device) // block_size
    return keys[start:, None] >= keys[None, :]
