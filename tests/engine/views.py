"""Views of a block, written by hand: what rules and policies choose can be read beside what they saw."""

from collections.abc import Mapping

import numpy as np

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.positions import PREDICTIONS, Positions, Predicts, position_index, positions_between
from stepsaver.engine.state import Unmasking, new_block
from stepsaver.engine.view import StepView, step_view

MASK = 1


def at(text: str) -> Positions:
    """The set of positions in `4-6,8`."""
    chosen = 0
    for item in filter(None, text.split(",")):
        first, _, last = item.partition("-")
        chosen |= positions_between(int(first), int(last or first) + 1)
    return chosen


def seen(
    masked: str,
    *,
    size: int = 8,
    sub_block: int = 4,
    step: int = 3,
    in_sub_block: int = 1,
    changed: str = "",
    unmasked: Mapping[int, str] | None = None,  # by step
    drift: Mapping[int, float] | None = None,  # by position, as is the next one
    confidence: Mapping[int, float] | None = None,
    last_run: Mapping[int, int] | None = None,
    drift_since_full: float = 0.0,
    layers: int = 3,
    stale: Mapping[int, str] | None = None,  # by layer, positions whose deltas are of another token
    ages: Mapping[int, int] | None = None,  # by position, how often its deltas were reused; else 0
    predicts: Predicts = "next",
    block_cache: bool = True,
) -> StepView:
    """What is seen before step `step`. Everything ran in the step before, unless it says otherwise."""
    decoding = DecodingSettings(size, sub_block, MASK, (), None)
    block = new_block(0, (), decoding=decoding, layers=layers)
    block.tokens[:] = np.arange(10, 10 + size)
    block.masked, block.changed = at(masked), at(changed)
    block.tokens[position_index(block.masked)] = MASK
    block.steps, block.steps_in_sub_block = step, in_sub_block
    block.unmaskings = [Unmasking(when, at(positions)) for when, positions in (unmasked or {}).items()]
    block.drift_since_full = drift_since_full
    history = block.history
    history.last_run[:] = step - 1
    for array, values in (
        (history.last_run, last_run),
        (history.drift, drift),
        (history.drift_since_run, drift),
        (block.confidence, confidence),
    ):
        for position, value in (values or {}).items():
            array[position] = value
    assert block.by_layer is not None
    block.by_layer.stamps.sublayers[:] = block.tokens
    for layer, positions in (stale or {}).items():
        block.by_layer.stamps.sublayers[:, layer, position_index(at(positions))] = 0
    for position, age in (ages or {}).items():
        block.by_layer.ages.sublayers[:, :, position] = age
    return step_view(
        block,
        layers=layers,
        sub_block_size=sub_block,
        block_cache=block_cache,
        prediction=PREDICTIONS[predicts],
    )
