"""As many threads as there are cores that nobody else keeps busy."""

import os
from collections.abc import Iterator

import pytest
import torch

from stepsaver.engine import machine
from stepsaver.engine.machine import CHOSEN_BY_USER, leave_cores_to_others

CPU = torch.device("cpu")


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process with eight threads that nobody has chosen."""
    before = torch.get_num_threads()
    monkeypatch.setenv(CHOSEN_BY_USER, "8")  # so that it is put back
    monkeypatch.delenv(CHOSEN_BY_USER)
    torch.set_num_threads(8)
    yield monkeypatch
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("others", "expected"), [(None, 8), (0.0, 8), (0.4, 8), (0.9, 7), (3.2, 5), (7.4, 1), (40.0, 1)]
)
def test_others_keep_their_cores(eight: pytest.MonkeyPatch, others: float | None, expected: int) -> None:
    eight.setattr(machine, "other_cores_now", lambda: others)
    leave_cores_to_others(CPU)
    assert torch.get_num_threads() == expected


def test_what_the_user_has_chosen_stays(eight: pytest.MonkeyPatch) -> None:
    eight.setattr(machine, "other_cores_now", lambda: 5.0)
    leave_cores_to_others(torch.device("meta"))
    os.environ[CHOSEN_BY_USER] = "8"
    leave_cores_to_others(CPU)
    assert torch.get_num_threads() == 8
