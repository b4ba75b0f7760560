"""What rules and policies may see of a sample before its next step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.prediction import NEXT, Prediction
from stepsaver.engine.rows import NO_ROWS, Rows, first_row, row_index, rows_between
from stepsaver.engine.state import Ages, BlockState, LayerHistory, RowHistory, Stamps, Unmasking


@dataclass(frozen=True)
class StepView:
    """The state of one block before a step. The arrays belong to the block: read them, never write."""

    layers: int
    prediction: Prediction
    sub_block_size: int
    block_cache: bool
    step: int  # denoising steps of this block so far
    tokens: NDArray[np.int64]
    masked: Rows
    never_unmasked: Rows
    changed: Rows  # rows whose token differs from the one their keys and values were computed with, in any layer
    by_layer: LayerHistory | None  # kept if deltas are kept or steps are checked
    unmaskings: list[Unmasking]
    confidence: NDArray[np.float64]
    history: RowHistory
    steps_in_sub_block: int
    drift_since_full: float

    @property
    def stamps(self) -> Stamps:
        """Per sublayer, layer and row, the token that the row had when it was last computed there."""
        assert self.by_layer is not None, "a rule that looks at single layers reuses deltas"
        return self.by_layer.stamps

    @property
    def ages(self) -> Ages:
        """Per sublayer, layer and row, for how many steps without a break its delta has been reused."""
        assert self.by_layer is not None, "a rule that looks at single layers reuses deltas"
        return self.by_layer.ages

    @property
    def last_run(self) -> NDArray[np.int64]:
        """Per row, the step of the block in which it was last run; -1: never."""
        return self.history.last_run

    @property
    def drift(self) -> NDArray[np.float64]:
        """Per row, how much it changed in the probe layers when it was last recomputed with the same token, relative to
        its size; negative: not measured.
        """
        return self.history.drift

    @property
    def drift_since_run(self) -> NDArray[np.float64]:
        """Per row, its drifts added up since all its layers last ran."""
        return self.history.drift_since_run

    @property
    def block_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def sub_block(self) -> Rows:
        """The sub-block being decoded: the first one with a row to unmask."""
        start = first_row(self.masked & ~self.never_unmasked) // self.sub_block_size * self.sub_block_size
        return rows_between(start, start + self.sub_block_size)

    @cached_property
    def candidates(self) -> Rows:
        """The rows that a step may unmask: the masked rows of the sub-block."""
        return self.sub_block & self.masked & ~self.never_unmasked

    def is_proposed(self, rows: Rows) -> bool:
        """Whether a step has proposed a token for each of some rows. Rows that were left out so far have none."""
        return not bool(np.isnan(self.confidence[row_index(rows)]).any())

    def unmasked_within(self, steps: int) -> Rows:
        """Rows that were unmasked in the last `steps` steps of the block."""
        rows = NO_ROWS
        for unmasking in reversed(self.unmaskings):
            if self.step - unmasking.step > steps:
                break
            rows |= unmasking.rows
        return rows


def step_view(
    block: BlockState, *, layers: int, sub_block_size: int, block_cache: bool, prediction: Prediction = NEXT
) -> StepView:
    return StepView(
        layers=layers,
        prediction=prediction,
        sub_block_size=sub_block_size,
        block_cache=block_cache,
        step=block.steps,
        tokens=block.tokens,
        masked=block.masked,
        never_unmasked=block.never_unmasked,
        changed=block.changed,
        by_layer=block.by_layer,
        unmaskings=block.unmaskings,
        confidence=block.confidence,
        history=block.history,
        steps_in_sub_block=block.steps_in_sub_block,
        drift_since_full=block.drift_since_full,
    )
