"""Partial commits: settled positions keep the keys and values that they got in earlier steps."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class PartialCommit(Rule):
    """A commit runs changed positions, positions unmasked in the last `1 + settle` steps, and the position that is
    read.

    Source: none; the reference's commit runs every position. The other positions already have the keys and values of
    their final token, computed when fewer of the block's tokens were known. `settle=all` is the exact commit.
    """

    name: ClassVar[str] = "partial_commit"
    purpose: ClassVar[str] = "let a commit keep the keys and values of positions that have settled"
    needs_block_cache: ClassVar[bool] = False

    settle: int | Literal["all"] = field(default=1, metadata=tuned(3, 1, 0))

    def __post_init__(self) -> None:
        if self.settle != "all" and self.settle < 0:
            raise UsageError(f"rule partial_commit: settle {self.settle} is negative")

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan

    def narrow_commit(self, plan: StepPlan, view: StepView) -> StepPlan:
        if self.settle == "all":
            return plan
        return plan.within(plan.reads | view.changed | view.unmasked_within(1 + self.settle))
