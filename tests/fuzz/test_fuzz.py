"""Whatever a user gives, a command ends with 0, 1, 2 or 130, and says in one line what is wrong: 2,000 tries of eight
kinds, always the same ones, and 20,000 others in the long campaign.
"""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.cases import FAMILIES
from tests.fuzz.command_process import MEMORY, Call, Command, run_calls
from tests.fuzz.workspace import Case, run_cases, write_workspace

AT_ONCE = 10  # cases that share a process
# How many cases of each kind the short campaign has; the long one has ten times as many.
SHARES = {
    "checkpoint": 700,
    "options": 600,
    "experiment": 250,
    "stored": 150,
    "lines": 150,
    "documents": 50,
    "training": 50,
    "entries": 50,
}
assert SHARES.keys() == FAMILIES.keys()
assert sum(SHARES.values()) == 2000


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("fuzz") / "workspace")


def campaign(family: str, workspace: Path, count: int, *, is_repeatable: bool) -> None:
    """Runs so many cases of a kind. Hypothesis makes a failing list of cases as short as it can."""
    tried = 0

    @settings(
        max_examples=count // AT_ONCE,
        deadline=None,
        database=None,
        derandomize=is_repeatable,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(FAMILIES[family](workspace), min_size=AT_ONCE, max_size=AT_ONCE, unique_by=repr))
    def ends_well(cases: list[Case]) -> None:
        nonlocal tried
        outcomes = run_cases(cases, workspace)
        for case, outcome in zip(cases, outcomes, strict=False):
            complaint = outcome.complaint()
            assert complaint is None, f"{case}\n{complaint}"
        tried += len(outcomes)

    ends_well()
    assert tried >= count, f"only {tried} of {count} cases were tried"


@pytest.mark.parametrize("family", SHARES)
def test_two_thousand_cases(family: str, workspace: Path) -> None:
    campaign(family, workspace, SHARES[family], is_repeatable=True)


@pytest.mark.long
@pytest.mark.parametrize("family", SHARES)
def test_twenty_thousand_cases(family: str, workspace: Path) -> None:
    campaign(family, workspace, 10 * SHARES[family], is_repeatable=False)


def planted_traceback(arguments: list[str]) -> int:
    return 1 // len(arguments[1:])


def planted_second_line(arguments: list[str]) -> int:
    print("one\ntwo", file=sys.stderr)
    return 2


def planted_cursor(arguments: list[str]) -> int:
    print("one \x1b[2J", file=sys.stderr)
    return 2


def planted_code(arguments: list[str]) -> int:
    return 3


def planted_death(arguments: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def planted_memory(arguments: list[str]) -> int:
    return len(bytearray(MEMORY + (1 << 30))) and 0


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (planted_traceback, "ZeroDivisionError"),
        (planted_second_line, "not one line"),
        (planted_cursor, "not one line"),
        (planted_code, "exit 3"),
        (planted_death, f"exit {-signal.SIGSEGV}"),
        (planted_memory, "MemoryError"),
    ],
)
def test_the_campaign_sees_what_it_looks_for(planted: Command, message: str, tmp_path: Path) -> None:
    [outcome] = run_calls([Call(["x"], tmp_path, planted)])
    assert message in (outcome.complaint() or "")
