"""A config that claims reuse has to run less, wherever it leaves work out."""

from types import SimpleNamespace
from typing import Any

import pytest

from stepsaver.bench.audit import CHECKS, CellEvidence


def cell(name: str, *, full: int, commit: int) -> Any:
    kinds = {"full": {"row_layers": full}, "commit": {"row_layers": commit}, "prefill": {"row_layers": 10 * len(name)}}
    timings = [SimpleNamespace(denoising_steps=10, by_kind=kinds)]
    found = SimpleNamespace(name=name, timings=timings, acting=("a rule",), has_the_caches_of=lambda other: True)
    found.work_per_step = lambda: CellEvidence.work_per_step(found)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("full", "commit", "is_found"), [(900, 100, False), (1000, 50, False), (1000, 100, True), (1100, 50, True)]
)
def test_rows_left_out_of_steps_or_of_commits_count(full: int, commit: int, is_found: bool) -> None:
    baseline, other = cell("baseline", full=1000, commit=100), cell("other", full=full, commit=commit)
    task: Any = SimpleNamespace(others=lambda: [(other, baseline)], has_something_to_leave_out=lambda cell: True)
    assert [level for level, _ in CHECKS["reuse"](task)] == ["invalid"] * is_found
