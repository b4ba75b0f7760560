"""What a forward runs without rules: the context, a denoising step, or the commit of a finished block.

Sub-blocks and the block cache live here. Rules only take work away from these plans.
"""

from functools import lru_cache

from stepsaver.engine.plan import StepPlan, whole_plan
from stepsaver.engine.positions import NO_POSITIONS, Positions, is_subset, positions_between
from stepsaver.engine.prediction import NEXT, Prediction
from stepsaver.engine.view import StepView


def base_plan(view: StepView) -> StepPlan:
    """A denoising step. It runs the sub-block if the block cache can serve the other positions, else the block."""
    reads = view.prediction.readers(view.candidates)
    if cache_serves(view):
        return whole_plan("sub", window=view.sub_block, reads=reads, layers=view.layers, prediction=view.prediction)
    window = positions_between(0, view.block_size)
    return whole_plan("full", window=window, reads=reads, layers=view.layers, prediction=view.prediction)


def cache_serves(view: StepView) -> bool:
    """Whether a step can run the sub-block alone, with the positions around it from the cache.

    A sub-block's first step cannot: positions outside the sub-block have changed. Also, all positions that predict a
    candidate must be in the sub-block. Where a position predicts the token after it, this fails while the sub-block's
    first position is masked. That is why the reference runs the whole block then.
    """
    return (
        view.block_cache
        and view.steps_in_sub_block > 0
        and view.sub_block_size < view.block_size
        and is_subset(view.prediction.readers(view.candidates), view.sub_block)
    )


@lru_cache(maxsize=256)
def prefill_plan(positions: int, *, reads_last: bool, layers: int, prediction: Prediction = NEXT) -> StepPlan:
    """Runs positions of the context. With `reads_last`, also reads the token that opens the first block."""
    window = positions_between(0, positions)
    reads = opening_readers(positions, prediction.of_context) if reads_last else NO_POSITIONS
    return whole_plan("prefill", window=window, reads=reads, layers=layers, prediction=prediction.of_context)


@lru_cache(maxsize=64)
def commit_plan(block_size: int, *, layers: int, prediction: Prediction = NEXT) -> StepPlan:
    """Runs all positions of a finished block, and reads the token that opens the next block."""
    window, reads = positions_between(0, block_size), opening_readers(block_size, prediction.of_context)
    return whole_plan("commit", window=window, reads=reads, layers=layers, prediction=prediction.of_context)


def opening_readers(positions: int, prediction: Prediction) -> Positions:
    """The position, among the first `positions`, that predicts the token after them, which opens the next block; maybe
    none.
    """
    return prediction.readers(1 << positions) & positions_between(0, positions)
