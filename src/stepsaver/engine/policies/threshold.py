"""Threshold-based parallel decoding (Fast-dLLM): unmask what the model is sure of, and always its best guess."""

from dataclasses import dataclass, field
from operator import ge, gt
from typing import ClassVar

from stepsaver.engine.defaults import THRESHOLD
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, by_confidence
from stepsaver.engine.positions import Positions
from stepsaver.engine.registry import tuned
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Threshold:
    """Unmasks every position whose confidence is greater than `threshold`, or not below it, and the most confident
    position.

    `at_most` limits the positions per step: the most confident first, and of equals the first position. With it, a
    small model that is sure of many positions at once takes as many steps as a model that is not.
    """

    name: ClassVar[str] = "threshold"

    threshold: float = field(default=THRESHOLD, metadata=tuned(0.95, 0.9, 0.8, 0.7, 0.6, 0.5))
    at_most: int | None = None
    strict: bool = True  # whether a confidence of exactly the threshold is not enough

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise UsageError(f"threshold {self.threshold} is outside [0, 1]")
        if self.at_most is not None and self.at_most < 1:
            raise UsageError(f"policy threshold: at_most {self.at_most} is not positive")

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        best, *others = by_confidence(candidates)
        passes = gt if self.strict else ge
        sure = [best, *(each for each in others if passes(each[1], self.threshold))]
        return sum(1 << position for position, _ in sure[: self.at_most])
