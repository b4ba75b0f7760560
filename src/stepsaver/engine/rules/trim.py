"""TRIM: token-level reuse minimization."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal
from zlib import crc32

import numpy as np

from stepsaver.engine.errors import UsageError
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import Positions, position_list, position_set
from stepsaver.engine.registry import tuned
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.view import StepView

NEAR = 2  # positions on either side of a changed position, which it affects most


@dataclass(frozen=True)
class Trim(Rule):
    """Recomputes only the positions that a decision needs.

    Source: the TRIM of the experiment log, which names it but never built it. The positions that predict a masked
    position of the sub-block always run. So do changed positions, which run again for `settle` further steps. What else
    of the window runs:
    `structural`: every masked position; settled positions that are not read again are locked.
    `drift`: the first masked position of the sub-block, masked positions near a change, positions not run for `age`
    steps, and of the rest the `budget` positions that drifted most when last recomputed; of equals, the less confident
    first.
    `changed`: nothing.
    `random`: `budget` positions drawn by a hash of position and step, a control that shows what choosing is worth.
    All levels are inexact: without the rule, the keys of a position that is left out would be rewritten.
    """

    name: ClassVar[str] = "trim"
    purpose: ClassVar[str] = "run the positions that a decision needs and leave the rest of the window as it is"

    level: Literal["structural", "drift", "changed", "random"] = field(
        default="changed", metadata=tuned("structural", "changed")
    )
    budget: int = 4
    settle: int = field(default=1, metadata=tuned(3, 1, 0))
    age: int = 4

    def __post_init__(self) -> None:
        for name, least in (("budget", 0), ("settle", 0), ("age", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"rule trim: {name} {getattr(self, name)} is below {least}")

    def probe_layers(self, layers: int) -> frozenset[int]:
        return frozenset({layers // 4}) if self.level == "drift" else frozenset()

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        if view.step == 0:
            return plan
        keep = plan.reads | view.changed | view.unmasked_within(1 + self.settle)  # run at most `settle` times since
        if self.level == "structural":
            keep |= view.masked
        elif self.level == "drift":
            keep |= self._felt(view) | self._overdue(view)
            keep |= self._most_drifted(plan.window & ~keep, view)
        elif self.level == "random":
            keep |= self._drawn(plan.window & ~keep, view)
        return plan.within(keep)

    def _felt(self, view: StepView) -> Positions:
        """The first position to unmask, and masked positions near a change."""
        near = view.changed
        for distance in range(1, NEAR + 1):
            near |= view.changed << distance | view.changed >> distance
        frontier = view.candidates & -view.candidates
        return (near & view.masked) | frontier

    def _overdue(self, view: StepView) -> Positions:
        return position_set(view.step - view.last_run > self.age)

    def _most_drifted(self, positions: Positions, view: StepView) -> Positions:
        confidence = np.nan_to_num(view.confidence, nan=0.0)
        ranked = sorted(position_list(positions), key=lambda position: (-view.drift[position], confidence[position]))
        return sum(1 << position for position in ranked[: self.budget])

    def _drawn(self, positions: Positions, view: StepView) -> Positions:
        order = sorted(position_list(positions), key=lambda position: crc32(b"%d %d" % (position, view.step)))
        return sum(1 << position for position in order[: self.budget])
