"""Memory for weights in 16 bits, in large pages if the system has them.

A step reads every weight once. With pages of 4 kB it has to look up an address for every 4 kB, which in a virtual
machine takes a quarter of the reading time. Single weights are too short for pages of 2 MB, so many share a chunk.
"""

import mmap
import threading
import weakref
from math import prod

import torch
from torch import Tensor

from stepsaver.engine.backends.cpu.large_pages import HAS_LARGE_PAGES, map_large_pages

CHUNK = 1 << 26  # bytes; unused ones are never touched
LINE = 64


class _Chunk:
    """The memory that the next weights are taken from. It lives as long as any weight in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: weakref.ref[mmap.mmap] | None = None
        self.used = 0

    def take(self, size: int) -> Tensor:
        """Bytes that no other weight uses."""
        with self.lock:
            memory = self.memory() if self.memory is not None else None
            if memory is None or self.used + size > len(memory):
                memory = map_large_pages(max(size, CHUNK))
                self.memory, self.used = weakref.ref(memory), 0
            start, self.used = self.used, self.used + size
        return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)

    def give_back(self, size: int, address: int) -> None:
        """Takes the bytes back if they were the last ones taken. Others stay until their chunk is freed."""
        with self.lock:
            memory = self.memory() if self.memory is not None else None
            if memory is None or self.used < size:
                return
            if torch.frombuffer(memory, dtype=torch.uint8, count=1, offset=self.used - size).data_ptr() == address:
                self.used -= size


_chunk = _Chunk()


def _size(shape: tuple[int, ...]) -> int:
    return -(-prod(shape) * torch.float16.itemsize // LINE) * LINE


def take_halves(*shape: int) -> Tensor:
    """A float16 tensor, not initialised."""
    if not HAS_LARGE_PAGES or not prod(shape):
        return torch.empty(shape, dtype=torch.float16)
    return _chunk.take(_size(shape)).view(torch.float16)[: prod(shape)].view(shape)


def give_back(halves: Tensor) -> None:
    """Gives back the memory of a tensor that will not be used."""
    if HAS_LARGE_PAGES and halves.numel():
        _chunk.give_back(_size(tuple(halves.shape)), halves.data_ptr())
