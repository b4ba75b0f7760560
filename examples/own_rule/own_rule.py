"""A reuse rule of one's own: a position whose token is known for some steps is not computed again in its block."""

from dataclasses import dataclass
from typing import ClassVar

from stepsaver.extending import Rule, StepPlan, StepView, UsageError


@dataclass(frozen=True)
class RestingRows(Rule):
    """Known positions rest `after` steps after they were unmasked: they keep the keys and values that they have."""

    name: ClassVar[str] = "resting_rows"
    purpose: ClassVar[str] = "leave out the positions whose tokens have been known for some steps"

    after: int = 1

    def __post_init__(self) -> None:
        if self.after < 1:
            raise UsageError(f"rule resting_rows: after {self.after} is not positive")

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        if view.step == 0:  # nothing of this block has been computed yet
            return plan
        awake = view.masked | view.changed | view.unmasked_within(self.after) | plan.reads
        return plan.within(awake)
