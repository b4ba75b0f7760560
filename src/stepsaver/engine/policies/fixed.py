"""A fixed number of rows per step, the most confident first (LLaDA, Nie et al., 2025): the number of steps is known."""

from dataclasses import dataclass
from typing import ClassVar

from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, by_confidence
from stepsaver.engine.positions import Positions
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Fixed:
    """Unmasks the `rows` most confident rows whatever their confidence; the first of equals.

    Unlike LLaDA, the count is per step of a sub-block, not derived from a number of steps per block.
    """

    name: ClassVar[str] = "fixed"

    rows: int = 1

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise UsageError(f"policy fixed: rows {self.rows} is not positive")

    def choose(self, candidates: Candidates, view: StepView) -> Positions:
        return sum(1 << row for row, _ in by_confidence(candidates)[: self.rows])
