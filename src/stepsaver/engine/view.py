"""What rules and policies may see of a sample before its next step."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.positions import (
    NEXT,
    NO_POSITIONS,
    Positions,
    Prediction,
    first_position,
    position_index,
    positions_between,
)
from stepsaver.engine.state import Ages, BlockState, LayerHistory, PositionHistory, Stamps, Unmasking


@dataclass(frozen=True)
class StepView:
    """The state of one block before a step. The arrays belong to the block: read them, never write."""

    layers: int
    prediction: Prediction
    sub_block_size: int
    block_cache: bool
    step: int  # denoising steps of this block so far
    tokens: NDArray[np.int64]
    masked: Positions
    never_unmasked: Positions
    changed: Positions  # positions whose token differs from the one of their keys and values, in any layer

    by_layer: LayerHistory | None  # kept if deltas are kept or steps are checked
    unmaskings: list[Unmasking]
    confidence: NDArray[np.float64]
    history: PositionHistory
    steps_in_sub_block: int
    drift_since_full: float

    @property
    def stamps(self) -> Stamps:
        """Per sublayer, layer and position, the token that the position had when it was last computed there."""
        assert self.by_layer is not None, "a rule that looks at single layers reuses deltas"
        return self.by_layer.stamps

    @property
    def ages(self) -> Ages:
        """Per sublayer, layer and position, for how many steps without a break its delta has been reused."""
        assert self.by_layer is not None, "a rule that looks at single layers reuses deltas"
        return self.by_layer.ages

    @property
    def last_run(self) -> NDArray[np.int64]:
        """Per position, the step of the block in which it was last run; -1: never."""
        return self.history.last_run

    @property
    def drift(self) -> NDArray[np.float64]:
        """Per position, how much it changed in the probe layers when it was last recomputed with the same token,
        relative to its size; negative: not measured.
        """
        return self.history.drift

    @property
    def drift_since_run(self) -> NDArray[np.float64]:
        """Per position, its drifts added up since all its layers last ran."""
        return self.history.drift_since_run

    @property
    def block_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def sub_block(self) -> Positions:
        """The sub-block being decoded: the first one with a position to unmask."""
        start = first_position(self.masked & ~self.never_unmasked) // self.sub_block_size * self.sub_block_size
        return positions_between(start, start + self.sub_block_size)

    @cached_property
    def candidates(self) -> Positions:
        """The positions that a step may unmask: the masked positions of the sub-block."""
        return self.sub_block & self.masked & ~self.never_unmasked

    def is_proposed(self, positions: Positions) -> bool:
        """Whether a step has proposed a token for each of some positions. Positions that were left out so far have
        none.
        """
        return not bool(np.isnan(self.confidence[position_index(positions)]).any())

    def unmasked_within(self, steps: int) -> Positions:
        """Positions that were unmasked in the last `steps` steps of the block."""
        positions = NO_POSITIONS
        for unmasking in reversed(self.unmaskings):
            if self.step - unmasking.step > steps:
                break
            positions |= unmasking.positions
        return positions


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
