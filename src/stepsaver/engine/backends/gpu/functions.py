"""What lies between two multiplications, or a multiplication and attention, as small functions that torch compiles.

Each becomes one kernel or two. They are given tensors and numbers only, so that all layers share what is compiled;
index tensors are whole, because what is not aligned to 16 bytes would be copied first. Shapes as in
`torch_attention.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepsaver.engine.models.rope import Rotation, rotate


def add_and_norm(h_ND: Tensor, added: Tensor, weight: Tensor, eps: float) -> Tensor:
    h_ND += added
    return F.rms_norm(h_ND, (h_ND.shape[-1],), weight, eps)


def rotate_and_store(
    projected: Tensor,
    turns: Tensor,
    query_scale: Tensor | None,
    norms: Tensor | None,
    eps: float,
    stored: Tensor,
    places: Tensor,
    chosen: Tensor | None,
    samples: int | None,
) -> Tensor:
    """The queries, of `samples` samples folded [S, K, H / K * R, E], or all of them as they are [N, H, E]."""
    kv_heads, width = stored.shape[1] // 2, stored.shape[3]
    heads_NHE = projected.view(len(projected), -1, width)
    queries, keys, values = heads_NHE.split_with_sizes((heads_NHE.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    if norms is not None:
        of_queries, of_keys = norms.chunk(2)
        queries, keys = F.rms_norm(queries, (width,), of_queries, eps), F.rms_norm(keys, (width,), of_keys, eps)
    rotation = Rotation(turns)
    slots, positions = places.unbind(-1)
    # by the cache's own dimensions: the compiler copies what is written through a view
    stored[slots, :, positions] = torch.cat((rotate(keys, rotation), values), 1)
    queries = rotate(queries, rotation)
    if query_scale is not None:
        queries = queries * query_scale[:, None, None]
    return queries if samples is None else fold(queries, chosen, samples, kv_heads)


def fold(queries_NHE: Tensor, chosen: Tensor | None, samples: int, kv_heads: int) -> Tensor:
    """[S, K, H / K * R, E]: the query heads that share keys and values, one after the other."""
    some = queries_NHE if chosen is None else queries_NHE[chosen]
    heads, width = some.shape[1:]
    split = some.view(samples, -1, kv_heads, heads // kv_heads, width)
    return split.permute(0, 2, 3, 1, 4).reshape(samples, kv_heads, -1, width)


def pack(mixed: list[Tensor], taken: Tensor | None, heads: int) -> Tensor:
    """[N, H E] of what came out for several samples and groups of them."""
    rows = []
    for each in mixed:
        samples, kv_heads, _, width = each.shape
        split = each.view(samples, kv_heads, heads // kv_heads, -1, width)
        rows.append(split.permute(0, 3, 1, 2, 4).reshape(-1, heads * width))
    packed = torch.cat(rows)
    return packed if taken is None else packed[taken]


def silu_product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def choose_token(logits_NV: Tensor, mask_id: int) -> Tensor:
    """[3, N] in float64, as `Backend.argmax`."""
    is_mask = torch.arange(logits_NV.shape[-1], device=logits_NV.device) == mask_id
    tokens = torch.where(is_mask, -torch.inf, logits_NV).argmax(-1)
    confidence = (logits_NV.gather(-1, tokens[:, None])[:, 0] - logits_NV.logsumexp(-1)).exp()
    return torch.stack((tokens.double(), confidence.double(), logits_NV.sum(-1).double()))
