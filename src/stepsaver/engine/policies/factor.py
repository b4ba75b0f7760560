"""Factor decoding (Fast-dLLM, Wu et al., 2025): the surer the least sure of a set, the larger the set may be."""

from dataclasses import dataclass, field
from typing import ClassVar

from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, by_confidence
from stepsaver.engine.positions import Positions
from stepsaver.engine.registry import tuned
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Factor:
    """Unmasks the n surest positions for the largest n with (n + 1)(1 - c_n) < factor, and always the best one."""

    name: ClassVar[str] = "factor"

    factor: float = field(default=1.0, metadata=tuned(0.5, 1.0, 1.5, 2.0))

    def __post_init__(self) -> None:
        if not self.factor >= 0:
            raise UsageError(f"policy factor: factor {self.factor} is negative")

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        chosen = 0
        for count, (position, confidence) in enumerate(by_confidence(candidates), 1):
            if count > 1 and not (count + 1) * (1 - confidence) < self.factor:
                break
            chosen |= 1 << position
        return chosen
