"""Several reveals from one forward, whatever the confidences: this is what layer reuse in mode `output` does."""

from dataclasses import dataclass, field
from typing import ClassVar

from stepsaver.engine.base_plan import cache_serves
from stepsaver.engine.errors import UsageError
from stepsaver.engine.policies.policy import Candidates, Choice
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rows import NO_ROWS, Rows
from stepsaver.engine.tuned import not_tuned
from stepsaver.engine.view import StepView


@dataclass(frozen=True)
class Forced:
    """The policy form of `layer_reuse:mode=output`, and the control that every other method is compared with.

    Takes the threshold's choice for a step. Then takes its choices for the following sub-block steps, up to the next
    step whose index is a multiple of k, as if they had been run, all from the same logits.
    """

    name: ClassVar[str] = "forced"

    k: int = field(metadata=not_tuned("a control: layer_reuse with mode=output does the same"))
    threshold: float = field(default=Threshold.threshold, metadata=not_tuned("a control"))

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UsageError(f"policy forced: k {self.k} is not positive")
        Threshold(self.threshold)

    def choose(self, candidates: Candidates, view: StepView) -> Choice:
        policy = Threshold(self.threshold)
        chosen = policy.choose(candidates, view).rows
        steps = 1
        while (view.step + steps) % self.k and self._runs_sub_block(view, chosen, steps):
            rest = [
                (row, sure)
                for row, sure in zip(candidates.rows, candidates.confidences, strict=True)
                if not chosen >> row & 1
            ]
            rows, confidences = zip(*rest, strict=True)
            chosen |= policy.choose(Candidates(rows, confidences), view).rows
            steps += 1
        return Choice(chosen, steps)

    def _runs_sub_block(self, view: StepView, chosen: Rows, steps: int) -> bool:
        """Whether the next step would run the sub-block alone: then `mode=output` leaves it out."""
        left = view.candidates & ~chosen
        return left != NO_ROWS and cache_serves(view, left, steps_ahead=steps)
