"""Memory of large results is used again, and never while a tensor lies in it."""

import gc

import pytest
import torch

from stepsaver.engine.backends.cpu.large_pages import HAS_LARGE_PAGES
from stepsaver.engine.backends.cpu.result_memory import LEAST, MOST, ResultMemory

ROWS = 64
WIDTH = LEAST // ROWS // 4 + 1  # just large enough to be kept

pytestmark = pytest.mark.skipif(not HAS_LARGE_PAGES, reason="this system has no large pages to ask for")


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t[1:, 2:], lambda t: t.view(-1)[3:].detach()])
def test_a_result_is_not_overwritten_while_a_view_of_it_is_there(view: object) -> None:
    memory = ResultMemory()
    first = memory.take(ROWS, WIDTH).fill_(1.0)
    seen = view(first)  # type: ignore[operator]
    del first
    memory.take(ROWS, WIDTH).fill_(2.0)
    assert (seen == 1.0).all()


def test_memory_without_a_tensor_is_used_again_for_as_much_or_less_and_not_for_more() -> None:
    memory = ResultMemory()
    address = memory.take(ROWS, WIDTH + 1).data_ptr()
    gc.collect()
    assert memory.take(ROWS, WIDTH).data_ptr() == address
    larger = memory.take(2 * ROWS, WIDTH)
    assert larger.shape == (2 * ROWS, WIDTH)
    assert larger.data_ptr() != address


@pytest.mark.parametrize("rows", [0, 1, MOST // WIDTH // 4 + 1])
def test_small_and_very_large_results_are_not_kept(rows: int) -> None:
    memory = ResultMemory()
    taken = memory.take(rows, WIDTH)
    assert taken.shape == (rows, WIDTH)
    assert taken.dtype == torch.float32
    assert memory.memory is None
