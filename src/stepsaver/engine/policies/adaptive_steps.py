"""Adaptive skip over steps: unmask more positions from one forward if its confidences justify it."""

from dataclasses import dataclass, field
from typing import ClassVar

from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, by_confidence
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import Positions
from stepsaver.engine.registry import tuned
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class AdaptiveSteps:
    """Beyond the threshold, unmasks up to `max_rows` further positions while the doubts of all unmasked positions add
    up to less than `margin`.

    Source: replaces what k = 2, 3 in mode `output` does blindly. It rests on a union bound: if each position is right
    with probability c_i, all positions are right with probability at least 1 - sum(1 - c_i). A position's doubt is 1 -
    c_i.
    """

    name: ClassVar[str] = "adaptive_steps"

    margin: float = field(default=0.3, metadata=tuned(0.2, 0.4, 0.8))
    max_rows: int = field(default=2, metadata=tuned(2, 4))
    threshold: float = Threshold.threshold

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise UsageError(f"policy adaptive_steps: margin {self.margin} is negative")
        if self.max_rows < 0:
            raise UsageError(f"policy adaptive_steps: max_rows {self.max_rows} is negative")
        Threshold(self.threshold)

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        chosen = Threshold(self.threshold).choose(candidates, view)
        doubt = sum(1 - sure for position, sure in by_confidence(candidates) if chosen >> position & 1)
        further = [(position, sure) for position, sure in by_confidence(candidates) if not chosen >> position & 1]
        for position, sure in further[: self.max_rows]:
            doubt += 1 - sure
            if not doubt < self.margin:
                break
            chosen |= 1 << position
        return chosen
