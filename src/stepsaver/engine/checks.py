"""What must hold before a step or a commit runs, whatever the rules: it reads nothing that was computed with another
token, and nothing that was never computed.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.packing import Layout, Step
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import NO_POSITIONS, Positions, describe, position_set, positions_between
from stepsaver.engine.state import NEVER, Sample
from stepsaver.engine.view import StepView


def assert_current(plan: StepPlan, view: StepView) -> None:
    """Asserts that keys and values of all positions that are not hidden, and all reused deltas, are of the position's
    token.
    """
    if plan.is_empty:  # mode `output` by definition: the last logits stand
        return
    assert view.by_layer is not None
    derived = view.by_layer.changed(view.tokens)
    assert view.changed == derived, f"changed positions are {describe(derived)}, and {describe(view.changed)} is noted"
    seen = positions_between(0, view.block_size) & ~plan.hidden
    assert seen & (seen + 1) == NO_POSITIONS, f"hidden positions {describe(plan.hidden)} are not the block's last ones"
    for layer, positions in enumerate(plan.layers):
        if positions.attention:
            _assert_none(seen & ~positions.keys_values & _stale(view, "keys_values", layer), "keys", layer)
        carried = plan.carried(layer)
        _assert_none(carried & ~positions.attention & _stale(view, "attention", layer), "attention deltas", layer)
        _assert_none(carried & ~positions.mlp & _stale(view, "mlp", layer), "MLP deltas", layer)


def new_stamps(sample: Sample, positions: int) -> NDArray[np.int64]:
    """Per position, the token that its keys and values were computed with, or `NEVER`. Prefills write the context."""
    stamps = np.full(positions, NEVER)
    stamps[: len(sample.context)] = sample.context
    return stamps


def assert_written(sample: Sample, steps: Sequence[Step]) -> None:
    """Asserts that steps read only what causal forwards and commits wrote, of the text's tokens.

    What the same forward writes counts, but for branches. Does nothing for a sample without stamps.
    """
    if sample.stamps is None:
        return
    text = [*sample.context, *sample.block.tokens[: sample.block.known].tolist()]
    stamps = sample.stamps.copy()
    for step in steps:
        _stamp(stamps, step)
    for step in steps:
        read = stamps[: step.start]
        assert (read != NEVER).all(), f"keys at position {int(np.argmin(read != NEVER))} are of a draft, or of nothing"
        known = min(step.start, len(text))
        assert (read[:known] == text[:known]).all(), "keys of another token than the text's would be read"
        if step.layout is not None:
            _assert_sees_its_own(step, step.layout, len(text))


def _assert_sees_its_own(step: Step, layout: Layout, known: int) -> None:
    """Asserts that nobody but a branch's own positions sees it, and that these see the text up to it.

    The text and its draft are causal, but for a block that is committed: there all see the known tokens.
    """
    positions, places, branches = (each.tolist() for each in (layout.positions, layout.places, layout.branches))
    assert len(set(places)) == len(places), "two positions have one place"
    for position, place, branch, (seen, gap, resume) in zip(
        positions, places, branches, layout.views.tolist(), strict=True
    ):
        sees = {*range(seen)} - {*range(gap, resume)}
        if branch < 0:
            assert place == position, f"position {position} of the text does not lie in its place"
            assert sees in ({*range(position + 1)}, {*range(known)}), f"position {position} is not causal"
            assert position < known or seen == position + 1, f"drafted position {position} is not causal"
            continue
        own = [index for index, other in enumerate(branches) if other == branch]
        before = {*range(min(positions[index] for index in own))}
        assert before <= sees, f"position {position} of branch {branch} does not see all of the text before it"
        assert place in sees, f"position {position} of branch {branch} does not see itself"
        foreign = sees - before - {places[index] for index in own}
        assert not foreign, f"position {position} of branch {branch} sees {sorted(foreign)}, which are not its own"


def stamp_positions(sample: Sample, steps: Sequence[Step]) -> None:
    """Notes the tokens whose keys and values some steps wrote. Those of branches do not count."""
    if sample.stamps is not None:
        for step in steps:
            _stamp(sample.stamps, step)


def _stamp(stamps: NDArray[np.int64], step: Step) -> None:
    if step.layout is None:
        stamps[step.start : step.start + len(step.tokens)] = step.tokens
    else:
        stamps[step.layout.places] = np.where(step.layout.branches < 0, step.tokens, NEVER)


def _stale(view: StepView, sublayer: str, layer: int) -> Positions:
    return position_set(getattr(view.stamps, sublayer)[layer] != view.tokens)


def _assert_none(positions: Positions, what: str, layer: int) -> None:
    assert positions == NO_POSITIONS, f"stale {what} of positions {describe(positions)} would be read in layer {layer}"
