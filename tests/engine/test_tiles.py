"""A processor whose matrix tiles are announced and do not work: 16 bits go on without them, or are refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from stepsaver.engine.backends.cpu import library, tiles
from stepsaver.engine.errors import UsageError

CPU = torch.device("cpu")


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A processor that announces tiles, and no library that could ask it."""
    monkeypatch.setattr(library, "is_loaded", lambda: False)
    monkeypatch.setattr(tiles, "are_announced", lambda: True)
    monkeypatch.setenv(tiles.LIMIT, "x")  # so that it is put back
    monkeypatch.delenv(tiles.LIMIT)
    tiles.limit_to_what_works.cache_clear()
    yield monkeypatch
    tiles.limit_to_what_works.cache_clear()


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGILL)


def dies_without_limit(*_: object) -> None:
    if tiles.LIMIT not in os.environ:
        dies()


def never_ends(*_: object) -> None:
    signal.pause()


@pytest.mark.parametrize("dtype", tiles.HALVES)
def test_broken_tiles_are_taken_from_the_library_that_trusts_them(
    announced: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    announced.setattr(torch.nn.functional, "linear", dies_without_limit)
    tiles.require_working_tiles(dtype, CPU)
    assert os.environ[tiles.LIMIT] == library.WITHOUT_TILES


@pytest.mark.parametrize("trial", [dies, never_ends])
def test_what_would_end_the_process_is_refused(announced: pytest.MonkeyPatch, trial: Callable[..., None]) -> None:
    announced.setattr(torch.nn.functional, "linear", trial)
    announced.setattr(tiles, "PATIENCE", 0.3)
    with pytest.raises(UsageError, match=f"bfloat16 ends the process on this CPU.*{tiles.LIMIT}="):
        tiles.require_working_tiles(torch.bfloat16, CPU)


def test_tiles_that_work_are_left_alone(announced: pytest.MonkeyPatch) -> None:
    announced.setattr(torch.nn.functional, "linear", lambda *_: None)
    tiles.require_working_tiles(torch.bfloat16, CPU)
    assert tiles.LIMIT not in os.environ


def test_other_precisions_and_processors_are_not_tried(announced: pytest.MonkeyPatch) -> None:
    announced.setattr(tiles, "_survives_trial", dies)
    tiles.require_working_tiles(torch.float32, CPU)
    tiles.require_working_tiles(torch.bfloat16, torch.device("meta"))
    announced.setattr(tiles, "are_announced", lambda: False)
    tiles.require_working_tiles(torch.bfloat16, CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decoding_in_16_bits_ends_well_without_kernels(dtype: str) -> None:
    """On this machine as it is, in a process of its own."""
    command = [sys.executable, "-m", "stepsaver", "generate", "--model", "embedded", "--dtype", dtype]
    done = subprocess.run(
        [*command, "--max-new-tokens", "4", "--prompt", "Say a word."],
        env=os.environ | {"STEPSAVER_KERNELS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
