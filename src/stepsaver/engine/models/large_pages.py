"""Memory in pages of 2 MB, where the system has them: fewer addresses to look up, and fewer pages to be given."""

import mmap

HAS_LARGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")


def map_large_pages(size: int) -> mmap.mmap:
    """Zeros, which take memory once they are touched."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
