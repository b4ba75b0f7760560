"""Threshold-based parallel decoding (Fast-dLLM): reveal what the model is sure of, and always its best guess."""

from dataclasses import dataclass
from typing import ClassVar

from stepsaver.engine.decode.policy import Candidates, Choice
from stepsaver.engine.defaults import THRESHOLD
from stepsaver.engine.errors import UsageError
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Threshold:
    """Reveals every row whose confidence is strictly greater than `threshold`, and the most confident row."""

    name: ClassVar[str] = "threshold"

    threshold: float = THRESHOLD

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise UsageError(f"threshold {self.threshold} is outside [0, 1]")

    def choose(self, candidates: Candidates, view: StepView) -> Choice:
        best = max(range(len(candidates.rows)), key=candidates.confidences.__getitem__)
        chosen = 1 << candidates.rows[best]
        for row, confidence in zip(candidates.rows, candidates.confidences, strict=True):
            if confidence > self.threshold:
                chosen |= 1 << row
        return Choice(chosen)
