"""Mixing: every row sees the first rows of its sample, as many as its step says (`packing.py`).

Inside a block nothing is masked, so one sample needs no mask at all: its queries meet exactly the rows it may see, as a
view of the cache. On a CPU, in float32, a kernel of our own takes all samples of a forward as they are, up to a length
of context, and causal rows as well. The others are mixed by torch's fused kernel, several samples in one call, their
queries and contexts padded and the query heads that share a key-value head folded into rows.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.backends.cpu import kernels
from stepsaver.engine.cache import Index, KeyValueCache
from stepsaver.engine.models.rope import Rotation, rotate
from stepsaver.engine.models.transformer import HeadNorms

FEW_ROWS = 16  # samples of no more rows are padded together, and those of more


class Segment(NamedTuple):
    """One step's part of the packed queries: rows start to stop - 1, and how much of its slot each of them sees."""

    start: int
    stop: int
    slot: int
    first: int  # rows that the first query sees
    length: int  # rows that the last one sees, which are the most
    growth: int | None  # how many more each sees than the one before it; None: it differs
    lengths: Index | None = None  # of each query, if they differ

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Alone(NamedTuple):
    """A segment that is attended in a call of its own."""

    queries: slice
    slot: int
    length: int
    mask: Tensor | None  # [queries, length]; None: all see everything


class PaddedGroup(NamedTuple):
    """Samples that are attended in one call: their queries padded to `rows`, their keys to `length`."""

    packed_rows: Tensor  # their queries among the packed ones
    padded_rows: Tensor | None  # and among the padded ones; None: they are all of them, in order
    slots: Tensor | slice  # a slice: a view of the cache, slots between the samples idle
    samples: int
    rows: int
    length: int
    mask: Tensor  # [samples, 1, 1, length], added to the scores


class Attending(NamedTuple):
    """How the queries of a forward are mixed."""

    by_kernel: Tensor | None  # the samples that our own kernel takes, described as it expects them
    alone: tuple[Alone, ...]
    grouped: tuple[PaddedGroup, ...]


def plan_attending(segments: Sequence[Segment], cache: KeyValueCache) -> Attending:
    """Our own kernel takes the samples that it is made for; the others are attended together if all their queries see
    the same rows and their contexts differ by less than a factor of four.
    """
    by_kernel: list[tuple[int, ...]] = []
    alone: list[Segment] = []
    groups: dict[tuple[int, bool, int], list[Segment]] = {}
    turns: dict[int, int] = {}  # a sample with several steps has one in each of several groups
    for each in segments:
        assert each.length <= cache.capacity
        if cache.kernel_attends(each.length):
            by_kernel += _kernel_segments(each)
        elif each.growth == 0:
            turn = turns[each.slot] = turns.get(each.slot, 0) + 1
            groups.setdefault((turn, each.rows > FEW_ROWS, each.length.bit_length() // 2), []).append(each)
        else:
            alone.append(each)
    alone += [group[0] for group in groups.values() if len(group) == 1]
    dtype, device = cache.stored.dtype, cache.device
    return Attending(
        torch.tensor(by_kernel) if by_kernel else None,
        tuple(_alone(each, device) for each in alone),
        tuple(_padded_group(group, dtype, device) for group in groups.values() if len(group) > 1),
    )


def _kernel_segments(segment: Segment) -> Iterator[tuple[int, ...]]:
    """A segment as our kernel takes it: in pieces whose rows see equally many rows, if they differ irregularly."""
    if segment.growth is not None:
        yield segment.start, segment.stop, segment.slot, segment.first, segment.growth
        return
    assert segment.lengths is not None
    starts = [0, *(np.flatnonzero(np.diff(segment.lengths)) + 1).tolist(), segment.rows]
    for start, stop in pairwise(starts):
        yield segment.start + start, segment.start + stop, segment.slot, int(segment.lengths[start]), 0


def _alone(segment: Segment, device: torch.device) -> Alone:
    mask = None
    if segment.lengths is not None:
        seen = np.arange(segment.length) < segment.lengths[:, None]
        mask = torch.from_numpy(seen).to(device, non_blocking=True)
    return Alone(slice(segment.start, segment.stop), segment.slot, segment.length, mask)


def _padded_group(group: list[Segment], dtype: torch.dtype, device: torch.device) -> PaddedGroup:
    rows = max(segment.rows for segment in group)
    length = max(segment.length for segment in group)
    slots = np.array([segment.slot for segment in group])
    # a view of all slots up to the last costs no copy, and is worth it while three of four are in use
    is_view = 4 * len(slots) > 3 * slots.max()
    order = slots if is_view else np.arange(len(slots))
    count = int(order.max()) + 1
    lengths = np.ones((count, 1, 1, 1), dtype=np.int64)
    lengths[order, 0, 0, 0] = [segment.length for segment in group]
    mask = torch.from_numpy(np.where(np.arange(length) < lengths, 0.0, -np.inf)).to(dtype)
    packed = np.concatenate([np.arange(segment.start, segment.stop) for segment in group])
    padded = np.concatenate([index * rows + np.arange(each.rows) for index, each in zip(order, group, strict=True)])
    is_dense = len(padded) == count * rows and (np.diff(padded) == 1).all()
    return PaddedGroup(
        packed_rows=torch.from_numpy(packed).to(device, non_blocking=True),
        padded_rows=None if is_dense else torch.from_numpy(padded).to(device, non_blocking=True),
        slots=slice(0, count) if is_view else torch.from_numpy(slots).to(device, non_blocking=True),
        samples=count,
        rows=rows,
        length=length,
        mask=mask.to(device, non_blocking=True),
    )


def mix(
    projected: Tensor,
    rotation: Rotation,
    cache: KeyValueCache,
    layer: int,
    norms: HeadNorms | None,
    *,
    cache_rows: Tensor | None = None,
    attending: Attending | None = None,
) -> Tensor | None:
    """Norms and rotates packed rows, writes their keys and values to the cache, and mixes their queries: [N, H * E].

    A row holds its queries, if they attend, and after them its keys and values, if they are cached. The caller must
    not use `projected` afterwards: a kernel rotates it in place.
    """
    mixed = None
    if cache.has_kernel:
        by_kernel = None if attending is None else attending.by_kernel
        head_norms = None if norms is None else kernels.Norms(norms.weight, norms.eps)
        mixed = kernels.mix(projected, rotation, cache.by_layer[layer], cache_rows, by_kernel, head_norms)
        if attending is None or not (attending.alone or attending.grouped):
            return mixed
    heads_NHE = projected.view(len(projected), -1, rotation.shape[-1])
    kv_heads = 0 if cache_rows is None else cache.kv_heads
    query_heads = heads_NHE.shape[1] - 2 * kv_heads
    if not cache.has_kernel:
        _turn(heads_NHE, query_heads, kv_heads, rotation, norms)
        if cache_rows is not None:
            cache.write(layer, cache_rows, heads_NHE[:, query_heads:])
    if attending is None:
        return None
    return _attend(heads_NHE[:, :query_heads], cache, layer, attending, mixed)


def _turn(heads_NHE: Tensor, query_heads: int, kv_heads: int, rotation: Rotation, norms: HeadNorms | None) -> None:
    """Norms and rotates queries and keys in place, both in the same operations."""
    turned = heads_NHE[:, : query_heads + kv_heads]
    normed = turned
    if norms is not None:
        queries, keys = turned.split_with_sizes((query_heads, kv_heads), 1)
        normed = torch.cat((norms.queries(queries), norms.keys(keys)), 1)
    rotate(normed, rotation, out=turned)


def _attend(
    queries_NHE: Tensor, cache: KeyValueCache, layer: int, attending: Attending, mixed: Tensor | None
) -> Tensor:
    """Mixes what our own kernel does not take; `mixed` is what it has done, if it took anything."""
    alone, together = attending.alone, attending.grouped
    if mixed is None and len(alone) + len(together) == 1:
        if alone:
            return _attend_one(queries_NHE, cache, layer, alone[0]).flatten(1)
        if together[0].padded_rows is None:
            return _attend_padded(queries_NHE, cache, layer, together[0]).flatten(1)
    mixed_NHE = torch.empty_like(queries_NHE) if mixed is None else mixed.view(queries_NHE.shape)
    for segment in alone:
        mixed_NHE[segment.queries] = _attend_one(queries_NHE[segment.queries], cache, layer, segment)
    for group in together:
        chosen = queries_NHE[group.packed_rows]
        if group.padded_rows is None:
            mixed_NHE[group.packed_rows] = _attend_padded(chosen, cache, layer, group)
        else:
            padded = chosen.new_zeros(group.samples * group.rows, *chosen.shape[1:])
            padded[group.padded_rows] = chosen
            mixed_NHE[group.packed_rows] = _attend_padded(padded, cache, layer, group)[group.padded_rows]
    return mixed_NHE.flatten(1)


def _attend_one(queries_RHE: Tensor, cache: KeyValueCache, layer: int, segment: Alone) -> Tensor:
    """One sample. On a CPU torch's fused kernel shares the key-value heads itself, which saves folding the queries."""
    keys, values = cache.read(layer, slice(segment.slot, segment.slot + 1), segment.length)
    sharing = queries_RHE.shape[1] // keys.shape[1]
    if sharing > 1 and cache.device.type != "cpu":
        return _attend_folded(queries_RHE, keys, values, segment.mask, sharing)
    queries = queries_RHE.transpose(0, 1).unsqueeze(0)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=segment.mask, enable_gqa=sharing > 1)
    return mixed[0].transpose(0, 1)


def _attend_folded(queries_RHE: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sharing: int) -> Tensor:
    """Heads that share keys and values are more rows: GPUs before compute capability 8.0 have no fused kernel that
    shares them, and torch would repeat keys and values for every head.
    """
    folded = _fold(queries_RHE, samples=1, kv_heads=keys.shape[1])
    mask = None if mask is None else mask.repeat(sharing, 1)
    return _unfold(F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask), heads=queries_RHE.shape[1])


def _attend_padded(queries_NHE: Tensor, cache: KeyValueCache, layer: int, group: PaddedGroup) -> Tensor:
    """One call for several samples, `rows` queries each."""
    keys, values = cache.read(layer, group.slots, group.length)
    folded = _fold(queries_NHE, samples=group.samples, kv_heads=keys.shape[1])
    mask = group.mask.expand(-1, -1, folded.shape[2], -1)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return _unfold(mixed, heads=queries_NHE.shape[1])


def _fold(queries_NHE: Tensor, *, samples: int, kv_heads: int) -> Tensor:
    """[samples, K, group * rows, E]: the query heads of a key-value head, one after the other."""
    _, heads, width = queries_NHE.shape
    split = queries_NHE.view(samples, -1, kv_heads, heads // kv_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(samples, kv_heads, -1, width)


def _unfold(mixed_SKRE: Tensor, *, heads: int) -> Tensor:
    """The reverse: [samples * rows, H, E]."""
    samples, kv_heads, _, width = mixed_SKRE.shape
    split = mixed_SKRE.view(samples, kv_heads, heads // kv_heads, -1, width)
    return split.permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
