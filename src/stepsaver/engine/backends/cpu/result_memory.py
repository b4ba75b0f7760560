"""Keeps the memory of large results between forwards.

The C library maps new memory for every request above 32 MB, and the system clears it page by page: 12,289 pages for 256
rows of 49,152 logits. So the last such memory is kept, and used again as soon as no tensor is in it.
"""

import mmap
import sys
import threading

import torch
from torch import Tensor

from stepsaver.engine.backends.cpu.large_pages import HAS_LARGE_PAGES, map_large_pages

LEAST, MOST = 1 << 25, 1 << 28  # bytes: less is kept by the C library itself, more is too much to keep
UNUSED = 3  # references to memory without a tensor: the attribute, the local name, the argument of `getrefcount`


class ResultMemory:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.memory: mmap.mmap | None = None

    def take(self, rows: int, width: int) -> Tensor:
        """A float32 tensor, not initialised."""
        size = rows * width * torch.float32.itemsize
        if not HAS_LARGE_PAGES or not LEAST < size <= MOST:
            return torch.empty(rows, width)
        with self.lock:
            memory = self.memory
            # a tensor, or any view of it, holds a reference to its memory
            if memory is None or len(memory) < size or sys.getrefcount(memory) > UNUSED:
                memory = self.memory = map_large_pages(size)
            return torch.frombuffer(memory, dtype=torch.float32, count=rows * width).view(rows, width)


_results = ResultMemory()


def take_result(rows: int, width: int) -> Tensor:
    return _results.take(rows, width)
