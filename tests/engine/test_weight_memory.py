"""Weights share chunks of memory: none overlaps another, and a chunk goes when the last weight in it does."""

import gc
import mmap
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepsaver.engine.backends.cpu import weight_memory
from stepsaver.engine.backends.cpu.large_pages import HAS_LARGE_PAGES, map_large_pages
from stepsaver.engine.backends.cpu.weight_memory import LINE, give_back, take_halves

chunked = pytest.mark.skipif(not HAS_LARGE_PAGES, reason="this system has no large pages to ask for")


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 400), min_size=1, max_size=20), given_back=st.sets(st.integers(0, 19)))
def test_no_weight_overlaps_another(sizes: list[int], given_back: set[int]) -> None:
    kept = {}
    for index, size in enumerate(sizes):
        taken = take_halves(size, 3)
        assert taken.shape == (size, 3)
        assert taken.dtype == torch.float16
        assert taken.data_ptr() % LINE == 0 or not size
        if index in given_back:
            give_back(taken)
        else:
            kept[index] = taken.fill_(float(index))
    for index, tensor in kept.items():
        assert (tensor == float(index)).all()


@chunked
def test_what_was_taken_last_can_be_taken_again_and_what_was_not_cannot() -> None:
    first, second = take_halves(100), take_halves(100)
    give_back(first)
    assert take_halves(100).data_ptr() not in (first.data_ptr(), second.data_ptr())
    last = take_halves(100)
    give_back(last)
    assert take_halves(100).data_ptr() == last.data_ptr()


@chunked
def test_a_chunk_goes_with_its_last_weight_and_a_large_weight_has_one_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mapped: list[weakref.ref[mmap.mmap]] = []

    def watched(size: int) -> mmap.mmap:
        memory = mmap.mmap(-1, size)
        mapped.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(weight_memory, "_chunk", weight_memory._Chunk())
    monkeypatch.setattr(weight_memory, "map_large_pages", watched)
    small, large = take_halves(1000), take_halves(weight_memory.CHUNK)
    assert len(mapped) == 2
    assert large.numel() == weight_memory.CHUNK
    del small
    gc.collect()
    assert [each() is None for each in mapped] == [True, False]


@chunked
def test_a_system_built_without_large_pages_maps_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)  # which the system refuses as it would refuse large pages
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(9999)
    assert map_large_pages(4096)[:8] == bytes(8)


@chunked
def test_too_much_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="bytes cannot be mapped"):
        map_large_pages(1 << 60)
