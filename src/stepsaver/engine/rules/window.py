"""A window around the sub-block instead of the whole block."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Window(Rule):
    """Replaces a would-be full step by the sub-block, the position before it and every changed position of the block.

    Source: none; it follows from the token shift. The reference runs the whole block while the sub-block's first
    position is masked, only because the position before the sub-block predicts it. `refresh` says which full steps
    stay: the first one of each `sub-block`, the first one of the `block`, or (`drift`) one whenever the drift of the
    recomputed positions has added up to `limit` since the last full step. Changed positions have to be in the window:
    otherwise the positions unmasked last would keep the keys of a mask.
    """

    name: ClassVar[str] = "window"
    purpose: ClassVar[str] = (
        "replace full steps by a window: the sub-block, the position before it and the changed positions"
    )
    needs_shift: ClassVar[bool] = True

    refresh: Literal["sub-block", "block", "drift"] = field(default="block", metadata=tuned("sub-block", "block"))
    limit: float = 0.5

    def __post_init__(self) -> None:
        if not self.limit >= 0:
            raise UsageError(f"rule window: limit {self.limit} is negative")

    def probe_layers(self, layers: int) -> frozenset[int]:
        return frozenset({layers // 4}) if self.refresh == "drift" else frozenset()

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        if plan.kind != "full" or view.step == 0 or self._refreshes(view):
            return plan
        return plan.within(view.sub_block | view.prediction.readers(view.sub_block) | view.changed)

    def _refreshes(self, view: StepView) -> bool:
        if self.refresh == "sub-block":
            return view.steps_in_sub_block == 0
        return self.refresh == "drift" and view.drift_since_full >= self.limit
