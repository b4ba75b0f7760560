"""How busy others keep the machine, from what the system counts."""

from pathlib import Path

import pytest

from stepsaver.engine import machine
from stepsaver.engine.machine import OtherWork, not_idle, other_cores_now

# user, nice, system, idle, waiting, interrupts (two), taken by the host, guests (which are in user already)
COUNTED = (
    "cpu  1 2 3 4 5 6 7 8 9 10\n"
    "cpu0 {user} 0 100 5000 300 7 3 0 999 999\n"
    "cpu1 50 0 0 0 0 0 0 {stolen} 0 0\n"
    "cpu2 {elsewhere} 0 0 0 0 0 0 0 0 0\nintr 5\n"
)  # of which the process may use two


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose clock ticks a hundred times a second, and on which ten seconds pass between two looks."""
    clock = iter([1000.0, 1010.0])
    monkeypatch.setattr(machine, "PROCESSOR_TIMES", tmp_path / "stat")
    monkeypatch.setattr(machine, "own_cores", lambda: {0, 1})
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(machine.os, "sysconf", {"SC_CLK_TCK": 100}.__getitem__)
    own = iter([(1.0, 0.5, 0.0, 0.0, 9.0), (5.0, 1.5, 0.5, 0.5, 19.0)])
    monkeypatch.setattr(machine.os, "times", lambda: next(own))
    return tmp_path / "stat"


def test_others_are_what_is_busy_and_not_this_process(system: Path) -> None:
    system.write_text(COUNTED.format(user=1000, stolen=0, elsewhere=0))
    others = OtherWork()
    system.write_text(
        COUNTED.format(user=1000 + 1500, stolen=300, elsewhere=900)
    )  # 18 s of all cores, 6 of them our own
    assert others.cores() == pytest.approx(1.2)


def test_counters_that_go_back_are_no_work(system: Path) -> None:
    system.write_text(COUNTED.format(user=1000, stolen=0, elsewhere=0))
    others = OtherWork()
    system.write_text(COUNTED.format(user=0, stolen=0, elsewhere=0))
    assert others.cores() == 0.0


@pytest.mark.parametrize(
    "content", [None, "", "cpu0 1 2 3\n", "cpu0 a b c d e f g h\n", "cpu9 1 2 3 4 5 6 7 8\n", "\n\n", "\xff"]
)
def test_a_system_that_does_not_say_is_no_reason_to_fail(system: Path, content: str | None) -> None:
    if content is not None:
        system.write_text(content, encoding="latin-1")
    assert OtherWork().cores() is None
    assert other_cores_now(0.0) is None


def test_what_is_said() -> None:
    assert not_idle(None) is None
    assert not_idle(0.1) is None
    assert "keep 1.2 of" in (not_idle(1.23) or "")
