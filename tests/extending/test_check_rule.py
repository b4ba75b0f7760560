"""The check of a rule of one's own: the example passes, and what is wrong with a rule is found."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from stepsaver.extending import Rule, StepPlan, StepView, UsageError, check_rule

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_rule"


def test_the_example_passes() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own_rule.py"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@dataclass(frozen=True)
class LeavesNothingOut(Rule):
    name: ClassVar[str] = "leaves_nothing_out"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan


@dataclass(frozen=True)
class ReadsStale(LeavesNothingOut):
    """It forgets the positions whose tokens have changed."""

    name: ClassVar[str] = "reads_stale"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan.within(plan.reads) if view.step else plan


@dataclass(frozen=True)
class Counts(LeavesNothingOut):
    """It acts on every third step of whatever sample: its texts depend on the batch."""

    name: ClassVar[str] = "counts"
    seen: ClassVar[list[int]] = [0]

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        self.seen[0] += 1
        acts = view.step and self.seen[0] % 3 == 0
        return plan.within(view.masked | view.changed | plan.reads) if acts else plan


@dataclass(frozen=True)
class Rounds(LeavesNothingOut):
    """Its text makes another rule."""

    name: ClassVar[str] = "rounds"
    share: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", self.share / 2)


@dataclass
class NotFrozen(Rule):
    name: ClassVar[str] = "not_frozen"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan


def test_a_rule_that_leaves_nothing_out_saves_nothing() -> None:
    assert check_rule(LeavesNothingOut()) == 0


@pytest.mark.parametrize(
    ("rule", "kind", "message"),
    [
        (ReadsStale(), AssertionError, "stale keys of positions"),
        (Counts(), AssertionError, "counts: texts, steps or scores depend on the batch"),
        (Rounds(), AssertionError, "rounds:share=0.25 makes another rule"),
        (NotFrozen(), UsageError, "is not a frozen dataclass"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_what_is_wrong_is_found(rule: Rule, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        check_rule(rule)
