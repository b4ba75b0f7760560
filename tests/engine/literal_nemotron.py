"""Nemotron-Labs-Diffusion's ways of decoding, literally: over whole sequences, without caches.

`logits` gets tokens and which of them each position sees, and returns [positions, vocabulary].
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

Logits = Callable[[Sequence[int], Tensor], Tensor]


class Written(NamedTuple):
    text: list[int]  # up to the stop token and the limit
    forwards: list[list[Any]]  # kind and positions, and of a verification how many drafted tokens it accepted


class Literal(NamedTuple):
    logits: Logits
    mask_id: int
    stop: int | None

    def autoregressive(self, prompt: Sequence[int], limit: int) -> Written:
        text, forwards = list(prompt), [["causal", len(prompt)]]
        while self._cut(text, prompt, limit) is None:
            text.append(self._best(text, causal(len(text)))[0][-1])
            forwards.append(["causal", 1])
        return Written(text[len(prompt) :], forwards[:-1] or forwards)

    def block(
        self, prompt: Sequence[int], limit: int, *, size: int, threshold: float | None = None, steps: int | None = None
    ) -> Written:
        """With a threshold, or a quota per step."""
        text, forwards = list(prompt), []
        while self._cut(text, prompt, limit) is None:
            forwards.append(["causal", size if forwards else len(prompt)])
            block = [self._best(text, causal(len(text)))[0][-1]] + [self.mask_id] * (size - 1)
            step = 0
            while self.mask_id in block and self.stop not in self._before_mask(block):
                known = len(text)
                tokens, sure = (each[known:] for each in self._best(text + block, seeing_itself(known, size)))
                masked = sorted((i for i in range(size) if block[i] == self.mask_id), key=lambda i: -sure[i])
                if threshold is None:
                    share, rest = divmod(size - 1, steps or size - 1)
                    chosen = masked[: max(1, share + (step < rest))]
                else:
                    chosen = [i for i in masked if i == masked[0] or not sure[i] < threshold]
                for i in chosen:
                    block[i] = tokens[i]
                forwards.append(["block", size])
                step += 1
            text += block if self.mask_id not in block else self._before_mask(block)
        return Written(self._cut(text, prompt, limit) or [], forwards)

    def linear(self, prompt: Sequence[int], limit: int, *, size: int) -> Written:
        """A draft and a verification in turns."""
        text, forwards = [*prompt], [["causal", len(prompt)]]
        text.append(self._best(text, causal(len(text)))[0][-1])
        while self._cut(text, prompt, limit) is None:
            known = len(text)
            ids = text + [self.mask_id] * (size - 1)
            draft = self._best(ids, seeing_itself(known - 1, size))[0][known:]
            written = self._best(text + draft, causal(len(ids)))[0][known - 1 :]
            agreed = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(draft, written, strict=False))))
            forwards += [["block", size], ["causal", size, agreed]]
            text += [*draft[:agreed], written[agreed]]
        return Written(self._cut(text, prompt, limit) or [], forwards)

    def _best(self, ids: Sequence[int], seen: Tensor) -> tuple[list[int], list[float]]:
        """The best token of every position that is not the mask, and its probability among all."""
        logits = self.logits(ids, seen)
        chances = logits.softmax(-1)
        chances[:, self.mask_id] = -1.0
        best = chances.max(-1)
        return best.indices.tolist(), best.values.tolist()

    def _before_mask(self, block: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token: token != self.mask_id, block))

    def _cut(self, text: list[int], prompt: Sequence[int], limit: int) -> list[int] | None:
        """The text up to its end; None if it has not ended."""
        new = text[len(prompt) :][:limit]
        if self.stop in new:
            return new[: new.index(self.stop) + 1]
        return new if len(new) == limit else None


def causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def seeing_itself(start: int, size: int) -> Tensor:
    """Causal up to `start`; the `size` positions from there on see each other too."""
    seen = causal(start + size)
    seen[start:, start:] = True
    return seen
