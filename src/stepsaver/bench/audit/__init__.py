"""Whether results can be trusted: each file in `checks/` turns stored cells into findings, in plain words.

A record is never compared with itself: every check that compares takes two different cells, or a cell and the
experiment's own file.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from stepsaver.bench.audit import checks
from stepsaver.bench.audit.evidence import CellEvidence, Finding, TaskEvidence, read_evidence

__all__ = ["CellEvidence", "Check", "Finding", "TaskEvidence", "all_checks", "audit", "read_evidence"]


class Check(Protocol):
    """What a file of `checks/` offers."""

    __name__: str
    ORDER: int

    @staticmethod
    def findings(task: TaskEvidence) -> Iterator[Finding]: ...


def all_checks() -> dict[str, Check]:
    """Returns every file of `checks/` by its name, sorted by `ORDER`."""
    found = {
        each.name: cast(Check, import_module(f"{checks.__name__}.{each.name}"))
        for each in iter_modules(checks.__path__)
    }
    return dict(sorted(found.items(), key=lambda each: each[1].ORDER))


def audit(task: TaskEvidence) -> list[Finding]:
    """Returns the findings of all checks, the invalid ones first."""
    found = [finding for check in all_checks().values() for finding in check.findings(task)]
    return sorted(found, key=lambda finding: finding.level)
