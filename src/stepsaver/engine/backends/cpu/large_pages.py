"""Memory in pages of 2 MB, if the system has them: fewer addresses to look up, and fewer pages to allocate."""

import errno
import mmap
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def map_large_pages(size: int) -> mmap.mmap:
    """A map of zeros. It takes memory only where it is touched."""
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{size} bytes cannot be mapped") from error
    with suppress(OSError):  # a system built without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """For caches: attention reads a few kB of each of many heads, which lie far apart."""
    count = prod(shape)
    if not HAS_LARGE_PAGES or not count:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(map_large_pages(count * dtype.itemsize), dtype=dtype, count=count).view(*shape)
