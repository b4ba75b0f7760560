"""What must hold before a step or a commit runs, whatever the rules: nothing is read that was computed with another
token, or never.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.rows import NO_ROWS, Rows, describe, row_set, rows_between
from stepsaver.engine.state import NEVER
from stepsaver.engine.view import StepView


def assert_current(plan: StepPlan, view: StepView) -> None:
    """Keys and values of every row that is not hidden, and every delta that is reused, are of the row's own token."""
    if plan.is_empty:  # mode `output` by definition: the last logits stand
        return
    assert view.by_layer is not None
    derived = view.by_layer.changed(view.tokens)
    assert view.changed == derived, f"changed rows are {describe(derived)}, and {describe(view.changed)} is noted"
    seen = rows_between(0, view.block_size) & ~plan.hidden
    assert seen & (seen + 1) == NO_ROWS, f"hidden rows {describe(plan.hidden)} are not the block's last ones"
    for layer, rows in enumerate(plan.layers):
        if rows.attention:
            _assert_none(seen & ~rows.keys_values & _stale(view, "keys_values", layer), "keys", layer)
        carried = plan.carried(layer)
        _assert_none(carried & ~rows.attention & _stale(view, "attention", layer), "attention deltas", layer)
        _assert_none(carried & ~rows.mlp & _stale(view, "mlp", layer), "MLP deltas", layer)


def assert_verified(steps: Sequence[Step], stamps: NDArray[np.int64], text: list[int]) -> None:
    """What a round of verified drafts reads was written by a causal forward or a commit, with the text's own tokens.

    `stamps` are the tokens that each position was last written with, `NEVER` where nothing or a draft wrote it. Rows
    that the same forward writes count, unless they are a draft's own.
    """
    stamps = stamps.copy()
    for step in steps:
        stamp_positions(stamps, step)
    for step in steps:
        read = stamps[: step.start]
        assert (read != NEVER).all(), f"keys at position {int(np.argmin(read != NEVER))} are of a draft, or of nothing"
        known = min(step.start, len(text))
        assert (read[:known] == text[:known]).all(), "keys of another token than the text's would be read"


def stamp_positions(stamps: NDArray[np.int64], step: Step) -> None:
    """Notes which tokens a step writes keys and values of; those of a draft are worth nothing."""
    stamps[step.start : step.start + len(step.tokens)] = NEVER if step.plan.kind == "draft" else step.tokens


def _stale(view: StepView, part: str, layer: int) -> Rows:
    return row_set(getattr(view.stamps, part)[layer] != view.tokens)


def _assert_none(rows: Rows, what: str, layer: int) -> None:
    assert rows == NO_ROWS, f"stale {what} of rows {describe(rows)} would be read in layer {layer}"
