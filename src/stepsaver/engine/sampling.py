"""Turns logits into proposals: a token for each row that was read, and how sure the model is of it.

The mask token is never proposed, but it counts in the softmax, as in the reference.
"""

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.backends import Backend, backend_for
from stepsaver.engine.errors import UsageError, shown


@dataclass(frozen=True)
class Sampling:
    """Greedy at temperature 0; else draws from the nucleus at that temperature."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int | None = None  # draw from so many of the likeliest tokens, then from their nucleus; None: from all

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"temperature {self.temperature} is not a number from 0 on")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top-p {self.top_p} is outside (0, 1]")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top-k {self.top_k} is not positive")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise UsageError(f"seed {shown(self.seed)} is no number of 64 bits")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Proposals(NamedTuple):
    """For each row that was read: the token it predicts, how sure the model is, and how likely its targets are."""

    tokens: NDArray[np.int64]
    confidence: NDArray[np.float64]
    target_scores: list[NDArray[np.float64]]  # log-probabilities; empty arrays where nothing is scored
    beside: NDArray[np.float64] = np.empty(0)  # what else was in the same transfer

    def each(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        """Per row, the token and the scores of the targets."""
        return zip(self.tokens.tolist(), self.target_scores, strict=True)


class NonFiniteLogits(ArithmeticError):
    """Logits have a NaN or an infinity. `row` is an index among the rows that were read."""

    def __init__(self, row: int, message: str = "logits are not finite") -> None:
        super().__init__(message)
        self.row = row


def uniform(seed: int, key: bytes, position: int, step: int) -> float:
    """A number in [0, 1) that depends only on these four values, so a text does not depend on its batch."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, position, step) + key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


@torch.inference_mode()
def propose(
    logits_NV: Tensor,
    *,
    mask_id: int,
    sampling: Sampling,
    uniforms: Sequence[float] = (),
    targets: Sequence[tuple[int, ...]] = (),
    beside: Tensor | None = None,
    backend: Backend | None = None,
) -> Proposals:
    """The proposals of all rows, with one transfer to the host. `targets` are the tokens to score, row by row.

    `beside` is a vector that the host needs too: a second transfer would wait for the device again.
    """
    logits_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    rows = len(logits_NV)
    scored = _target_scores(logits_NV, targets)
    if sampling.is_greedy:
        chosen = (backend or backend_for(logits_NV.dtype, logits_NV.device)).argmax(logits_NV, mask_id)
    else:
        drawn, sureness = _draw(logits_NV, mask_id, sampling, uniforms)
        chosen = torch.stack((drawn.double(), sureness.double(), logits_NV.sum(-1).double()))
    wanted = [chosen.flatten(), scored.double()] + ([] if beside is None else [beside.double()])
    host = torch.cat(wanted).cpu().numpy()
    tokens, confidence, sums = host[: 3 * rows].reshape(3, rows)
    scores, others = np.split(host[3 * rows :], [len(scored)])
    if not np.isfinite(sums).all():
        raise NonFiniteLogits(int(np.argmin(np.isfinite(sums))))
    ends = np.cumsum([len(each) for each in targets])
    split = np.split(scores, ends[:-1]) if len(targets) else [host[:0]] * rows
    return Proposals(tokens.astype(np.int64), confidence, split, others)


def _target_scores(logits_NV: Tensor, targets: Sequence[tuple[int, ...]]) -> Tensor:
    """The log-probabilities of all rows' targets, in one vector."""
    if not any(targets):
        return logits_NV.new_empty(0)
    rows = [row for row, tokens in enumerate(targets) for _ in tokens]
    tokens = [token for each in targets for token in each]
    index = torch.tensor([rows, tokens], dtype=torch.int64).to(logits_NV.device, non_blocking=True)
    return logits_NV[index[0], index[1]] - logits_NV.logsumexp(-1)[index[0]]


def _draw(logits_NV: Tensor, mask_id: int, sampling: Sampling, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Draws from the nucleus by the inverse of its distribution function.

    The nucleus is taken over all tokens including the mask, and normalised with it. The draw leaves the mask out, so a
    row whose nucleus is mostly mask has a low confidence. If the nucleus is only the mask, draws from all other tokens.
    With `top_k`, all tokens are the likeliest so many, and the mask.
    """
    probabilities, order = (logits_NV.double() / sampling.temperature).softmax(-1).sort(-1, descending=True)
    if sampling.top_k is not None:
        is_mask = order == mask_id
        kept = is_mask | ((~is_mask).cumsum(-1) <= sampling.top_k)
        probabilities = torch.where(kept, probabilities, 0.0)
        probabilities /= probabilities.sum(-1, keepdim=True)
    nucleus = torch.where(probabilities.cumsum(-1) - probabilities < sampling.top_p, probabilities, 0.0)
    nucleus = nucleus / nucleus.sum(-1, keepdim=True)
    allowed = torch.where(order == mask_id, 0.0, nucleus)
    only_mask = allowed.sum(-1, keepdim=True) == 0
    allowed = torch.where(only_mask, torch.where(order == mask_id, 0.0, probabilities), allowed)
    steps = allowed.cumsum(-1)
    targets = torch.tensor(uniforms, dtype=torch.float64).to(steps.device, non_blocking=True)[:, None] * steps[:, -1:]
    chosen = torch.searchsorted(steps, targets, right=True).clamp_max(steps.shape[-1] - 1)
    return order.gather(-1, chosen)[:, 0], allowed.gather(-1, chosen)[:, 0]
