"""A quota of positions per step, so that a block takes at most a given number of steps (SDAR, Cheng et al., 2025)."""

from dataclasses import dataclass
from typing import ClassVar

from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, by_confidence
from stepsaver.engine.positions import Positions
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Quota:
    """Unmasks a step's share of its block's positions, the most confident first; the first of equals.

    Source: SDAR's public decoder. The positions of a block are divided by `steps`, as published the number of its
    positions; the remainder goes to the first steps. Without a threshold this is SDAR's static rule. With a threshold
    it is the dynamic rule: unmask every position above it if these are at least as many as the share. One difference:
    if a block has sub-blocks, their positions are divided. After a causal context a block's first token is known, and
    the other positions are divided.
    """

    name: ClassVar[str] = "quota"

    steps: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"policy quota: steps {self.steps} is not positive")
        if self.threshold is not None and not 0.0 <= self.threshold <= 1.0:
            raise UsageError(f"policy quota: threshold {self.threshold} is outside [0, 1]")

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        positions = view.sub_block_size - view.prediction.has_causal_context
        share, remainder = divmod(positions, self.steps or positions)
        quota = max(1, share + (view.steps_in_sub_block < remainder))
        ranked = by_confidence(candidates)
        if self.threshold is not None:
            quota = max(quota, sum(sure > self.threshold for _, sure in ranked))
        return sum(1 << position for position, _ in ranked[:quota])
