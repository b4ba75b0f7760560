"""Whether results can be trusted: each file in `checks/` turns stored cells into findings, in plain words.

A record is never compared with itself: every check that compares takes two different cells, or a cell and the
experiment's own file.
"""

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast, get_args

from stepsaver.bench.audit import checks
from stepsaver.bench.audit.evidence import CellEvidence, Finding, Level, TaskEvidence, read_evidence
from stepsaver.bench.experiment import Experiment

__all__ = ["CellEvidence", "Check", "Finding", "TaskEvidence", "all_checks", "audit", "read_evidence", "timed_again_by"]


LIMITED = re.compile(r"(.+?)(?:_limit_(\d+))?")  # the folder of a task


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
    """Returns the findings of all checks, the worst first."""
    found = [finding for check in all_checks().values() for finding in check.findings(task)]
    return sorted(found, key=lambda finding: get_args(Level).index(finding.level))


def timed_again_by(experiment: Experiment, folder: str, findings: Sequence[Finding]) -> str:
    """Returns the command that times again what was disturbed, all configs if a baseline was; empty if nothing was."""
    configs = sorted({name for finding in findings if finding.level == "disturbed" for name in finding.configs})
    if not configs:
        return ""
    task, limit = LIMITED.fullmatch(folder).groups()  # type: ignore[union-attr]
    limited = [f"--limit {limit}"] if limit else []
    named = [] if set(configs) & set(experiment.baselines) else configs
    return " ".join(["stepsaver run", experiment.name, "--task", task, *limited, "--force", *named])
