"""All that a forward sends to the card, in one buffer and one copy."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from stepsaver.engine.backends.backend import Index, Upload

LINE = 128  # bytes: every tensor begins at a multiple, because compiled functions copy what is aligned to less than 16


class OneCopy(Upload):
    """The buffers are made for one forward, so nothing is written while a copy may still read it: torch gives pinned
    memory out again when the copies from it are done, and the card's when all work before is.
    """

    size = 1 << 16  # of the next buffers: as large as any forward so far needed

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._used = self._sent = 0
        self._begin(self.size)

    def tensor(self, array: Index) -> Tensor:
        here, there = self.empty(array.shape, torch.int64)
        here.numpy()[...] = array
        return there

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        taken = prod(shape) * dtype.itemsize
        if self._used + taken > len(self._here):
            self.send()
            OneCopy.size = max(OneCopy.size, 2 * len(self._here) + taken)
            self._begin(OneCopy.size)
        part = slice(self._used, self._used + taken)
        self._used += -(-taken // LINE) * LINE
        return self._here[part].view(dtype).view(*shape), self._there[part].view(dtype).view(*shape)

    def send(self) -> None:
        part = slice(self._sent, self._used)
        if part.start < part.stop:
            self._there[part].copy_(self._here[part], non_blocking=True)
            self._sent = self._used

    def _begin(self, size: int) -> None:
        self._here = torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        self._there = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._used = self._sent = 0
