"""Sets of positions, plans, what a step runs without rules, and what a block notes of it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.plan import (
    LayerPositions,
    LayerRun,
    StepPlan,
    commit_plan,
    empty_plan,
    opening_readers,
    prefill_plan,
    whole_plan,
)
from stepsaver.engine.positions import (
    NEXT,
    SELF,
    describe,
    first_position,
    index_within,
    is_subset,
    position_index,
    position_list,
    position_set,
    position_sets,
    positions_between,
)
from stepsaver.engine.rules.rule import base_plan
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Request, Sample, Writer, ending_of, new_block, request_key
from tests.engine.views import MASK, at, seen

positions = st.sets(st.integers(0, 40)).map(lambda chosen: sum(1 << position for position in chosen))


@given(positions, positions)
def test_sets_of_positions_behave_like_sets(one: int, other: int) -> None:
    assert position_list(one) == tuple(sorted(position_list(one)))
    assert is_subset(one, other) == (set(position_list(one)) <= set(position_list(other)))
    assert position_index(one).tolist() == list(position_list(one))
    flags = torch.zeros(41, dtype=torch.bool).numpy()
    flags[position_index(one)] = True
    assert position_set(flags) == one
    both = np.stack([flags, np.isin(np.arange(41), position_list(other))])
    assert position_sets(both) == [one, other]
    assert index_within(one & other, one).tolist() == [
        position_list(one).index(position) for position in position_list(one & other)
    ]
    assert at(describe(one) if one else "") == one
    if one:
        assert first_position(one) == min(position_list(one))


def test_sets_are_told_as_ranges() -> None:
    assert describe(0) == "none"
    assert describe(0b1) == "0"
    assert describe(0b110111101) == "0,2-5,7-8"
    assert positions_between(2, 4) == 0b1100


def test_a_plan_prints_as_one_line() -> None:
    assert str(commit_plan(32, layers=28)) == (
        "commit: positions 0-31; layers 0-26 attention 0-31 keys 0-31 mlp 0-31; "
        "layers 27-27 attention 31 keys 0-31 mlp 31; head 31"
    )
    assert str(whole_plan("full", window=at("0-7"), reads=at("3"), layers=1).hiding(at("6-7"))) == (
        "full: positions 0-5; hidden 6-7; layers 0-0 attention 3 keys 0-5 mlp 3; head 3"
    )
    assert str(empty_plan(3)) == "reused: no forward"


FULL = whole_plan("full", window=at("0-7"), reads=at("3-6"), layers=4)


@pytest.mark.parametrize(
    ("plan", "kind", "window", "reads", "hidden"),
    [
        (FULL.within(at("2-7")), "sub", "2-7", "3-6", "none"),
        (FULL.within(at("0-9")), "full", "0-7", "3-6", "none"),
        (FULL.within(at("4-7")).within(at("5")), "sub", "5", "5", "none"),
        (FULL.within(at("2-7")).within(0), "reused", "none", "none", "none"),
        (FULL.within(0), "reused", "none", "none", "none"),
        (FULL.hiding(at("6-7")), "full", "0-5", "3-5", "6-7"),
        (FULL.hiding(at("6-7")).hiding(at("7")), "full", "0-5", "3-5", "6-7"),
        (FULL.hiding(at("7")).hiding(at("6")), "full", "0-5", "3-5", "6-7"),
        (FULL.hiding(at("6-7")).within(at("4-7")), "sub", "4-5", "4-5", "6-7"),
        (FULL.hiding(0), "full", "0-7", "3-6", "none"),
        (FULL.within(at("2-7")).also_reading(at("1,7")), "sub", "2-7", "3-7", "none"),
        (commit_plan(8, layers=4).within(at("1,7")), "commit", "1,7", "7", "none"),
        (prefill_plan(8, reads_last=False, layers=4).within(at("1-7")), "prefill", "1-7", "none", "none"),
    ],
)
def test_a_narrowed_plan(plan: StepPlan, kind: str, window: str, reads: str, hidden: str) -> None:
    assert (plan.kind, *map(describe, (plan.window, plan.reads, plan.hidden))) == (kind, window, reads, hidden)
    assert set(plan.layers[:-1]) == {LayerPositions(plan.window, plan.window, plan.window)}
    assert plan.layers[-1] == (plan.reads, plan.window, plan.reads)


def mixed_plan() -> StepPlan:
    """Four layers; position 1 reuses deltas in the middle two, and keeps its keys in the second."""
    whole, reuses, keeps = at("0-3"), at("0,2-3"), at("0-1")
    layers = [(whole, whole, whole), (reuses, whole, reuses), (reuses, keeps, reuses), (at("3"), whole, at("3"))]
    return StepPlan("sub", whole, at("3"), tuple(LayerPositions(*each) for each in layers))


def test_figures_of_a_plan_whose_layers_differ() -> None:
    plan = mixed_plan()
    assert [(run.first, run.last, run.length) for run in plan.runs] == [(0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 4, 1)]
    assert describe(plan.run_everywhere) == "0,2-3"
    assert describe(plan.rewritten) == "0-1"
    assert not plan.rewrites_alike
    assert [describe(plan.carried(layer)) for layer in range(4)] == ["0-3", "0-3", "0-3", "3"]
    assert (plan.attention_run, plan.keys_values_run, plan.mlp_run) == (4 + 3 + 3 + 1, 4 + 4 + 2 + 4, 4 + 3 + 3 + 1)
    assert (plan.attention_reused, plan.mlp_reused) == (2, 2)
    assert (plan.positions, plan.is_empty) == (4, False)


def test_layers_that_run_the_same_are_one_run_but_the_last() -> None:
    assert FULL.runs == (LayerRun(0, 3, FULL.layers[0]), LayerRun(3, 4, FULL.layers[3]))
    reads_all = whole_plan("full", window=at("0-7"), reads=at("0-7"), layers=4)
    assert [(run.first, run.last) for run in reads_all.runs] == [(0, 3), (3, 4)]
    assert [(run.first, run.last) for run in whole_plan("sub", window=1, reads=1, layers=1).runs] == [(0, 1)]
    assert FULL.rewrites_alike
    assert describe(FULL.run_everywhere) == describe(FULL.rewritten) == "0-7"
    assert (FULL.mlp_run, FULL.mlp_reused, FULL.keys_values_run) == (3 * 8 + 4, 0, 32)


@given(positions.filter(bool), positions)
def test_plans_compare_by_work(window: int, other: int) -> None:
    plan = whole_plan("full", window=window, reads=window, layers=4)
    narrowed = plan.within(other)
    assert narrowed <= plan
    assert (plan <= narrowed) == is_subset(window, other)
    assert empty_plan(4) <= plan
    assert hash(plan) == hash(whole_plan("full", window=window, reads=window, layers=4))


def test_what_is_more_work() -> None:
    plan, hiding = mixed_plan(), FULL.hiding(at("7"))
    whole = whole_plan("sub", window=at("0-3"), reads=at("3"), layers=4)
    assert plan <= whole
    assert not whole <= plan  # in layers
    assert not plan.also_reading(at("2")) <= plan
    assert hiding <= FULL
    assert not FULL.within(at("0-6")) <= hiding  # attends to more
    assert not whole_plan("full", window=at("0-7"), reads=at("3-6"), layers=4).within(at("0-3")) <= plan


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ({"masked": "0-7", "in_sub_block": 0, "step": 0}, "full: 0-7 reads 0-2"),  # position 0 has no one before it
        ({"masked": "5-7"}, "sub: 4-7 reads 4-6"),
        ({"masked": "5-7", "in_sub_block": 0}, "full: 0-7 reads 4-6"),
        ({"masked": "4-7"}, "full: 0-7 reads 3-6"),  # the first position's token is predicted by the one before
        ({"masked": "5-7", "block_cache": False}, "full: 0-7 reads 4-6"),
        ({"masked": "5-7", "sub_block": 8}, "full: 0-7 reads 4-6"),
        ({"masked": "2-3,7", "sub_block": 2}, "full: 0-7 reads 1-2"),
        ({"masked": "3,7", "sub_block": 2}, "sub: 2-3 reads 2"),
        ({"masked": "4-7", "predicts": "self"}, "sub: 4-7 reads 4-7"),
        ({"masked": "4-7", "predicts": "self", "in_sub_block": 0}, "full: 0-7 reads 4-7"),
    ],
)
def test_what_a_step_runs_without_rules(view: dict, expected: str) -> None:
    plan = base_plan(seen(**view))
    assert f"{plan.kind}: {describe(plan.window)} reads {describe(plan.reads)}" == expected
    assert plan.predicted == plan.prediction.predicted(plan.reads)
    assert plan.layers[0] == (plan.window,) * 3
    assert plan.layers[-1] == (plan.reads, plan.window, plan.reads)
    assert len(plan.layers) == 3


def test_contexts_and_commits_read_what_opens_the_next_block() -> None:
    for prediction, last in ((NEXT, "7"), (SELF, "none")):
        assert describe(opening_readers(8, prediction)) == last
        commit = commit_plan(8, layers=2, prediction=prediction)
        context = prefill_plan(8, reads_last=True, layers=2, prediction=prediction)
        assert (commit.kind, context.kind) == ("commit", "prefill")
        assert {describe(commit.reads), describe(context.reads)} == {last}
        assert describe(commit.window) == describe(context.window) == "0-7"
    assert prefill_plan(8, reads_last=False, layers=2).reads == 0


def block_of(given: tuple[int, ...], *, layers: int | None = 2, last: int | None = None, start: int = 16) -> BlockState:
    return new_block(start, given, decoding=DecodingSettings(8, 4, MASK, (2,), None), layers=layers, last=last)


def proposed(*tokens: int) -> Proposals:
    return Proposals(np.array(tokens), np.array([0.5] * len(tokens)), [np.array([-float(each)]) for each in tokens])


def test_a_block_opens_masked_behind_what_is_given() -> None:
    block = block_of((5, 6), last=21)
    assert block.tokens.tolist() == [5, 6, *[MASK] * 6]
    assert [describe(each) for each in (block.masked, block.never_unmasked, block.changed)] == ["2-7", "5-7", "0-7"]
    assert (block.known, block.size, block.steps, block.opening) == (2, 8, 0, None)
    assert describe(block_of((5,), last=10).never_unmasked) == "1-7"  # a continuation that ended before
    assert block_of((5,)).never_unmasked == 0


@pytest.mark.parametrize("layers", [None, 2])
def test_a_block_notes_what_a_step_computes_and_unmasks(layers: int | None) -> None:
    block = block_of((5, 6), layers=layers)
    block.record_run(FULL.within(at("0-7")) if layers is None else whole_plan("full", window=255, reads=15, layers=2))
    assert block.changed == 0
    assert block.history.last_run.tolist() == [0] * 8
    block.note(at("2-4,8"), proposed(7, 8, 9, 30))
    assert block.opening == 30
    assert block.noted(3) == (8, np.array([-8.0]))
    block.unmask(at("2,4"), np.array([7, MASK]))  # a scored text may hold the mask itself
    assert [describe(each) for each in (block.masked, block.changed)] == ["3,5-7", "2"]
    assert block.tokens.tolist() == [5, 6, 7, MASK, MASK, MASK, MASK, MASK]
    block.count_step(is_last_of_sub_block=False)
    assert (block.steps, block.steps_in_sub_block, block.known) == (1, 1, 3)
    block.record_run(whole_plan("sub", window=at("3-6"), reads=at("3"), layers=2))
    assert describe(block.changed) == "2"
    assert block.history.last_run.tolist() == [0, 0, 0, 1, 1, 1, 1, 0]
    block.count_step(is_last_of_sub_block=True)
    assert (block.steps, block.steps_in_sub_block) == (2, 0)
    assert [(each.step, describe(each.positions)) for each in block.unmaskings] == [(0, "2,4")]


def test_a_position_becomes_a_token_once_and_from_what_was_computed() -> None:
    block = block_of((5,))
    with pytest.raises(AssertionError, match="computed for it"):
        block.unmask(at("1"), np.array([7]))
    block.note(at("1"), proposed(7))
    with pytest.raises(AssertionError, match="unmasked once"):
        block.unmask(at("0"), np.array([7]))


def test_deltas_age_while_they_are_reused_and_changes_are_found_layer_by_layer() -> None:
    block = block_of((5, 6, 7, 8, 9, 10, 11, 12))
    block.record_run(whole_plan("full", window=at("0-3"), reads=at("0-3"), layers=2))
    assert describe(block.changed) == "4-7"
    assert block.by_layer is not None
    reuse = LayerPositions(at("0"), at("0-3"), at("0-1"))
    for _ in range(2):
        block.record_run(StepPlan("sub", at("0-3"), at("3"), (reuse, LayerPositions(at("3"), at("0,3"), at("3")))))
    assert block.by_layer.ages.attention[0].tolist() == [0, 2, 2, 2, 0, 0, 0, 0]
    assert block.by_layer.ages.mlp[0].tolist() == [0, 0, 2, 2, 0, 0, 0, 0]
    assert block.by_layer.ages.mlp[1].tolist() == [0] * 8  # in the last layer only what is read goes on
    block.tokens[1] = 30
    block.record_run(StepPlan("sub", at("1"), at("1"), (LayerPositions(2, 2, 2), LayerPositions(2, 0, 2))))
    assert describe(block.changed) == "1,4-7"  # the second layer's keys are of the token before


def test_drift_adds_up_until_a_position_runs_everywhere_and_a_full_step_clears_it() -> None:
    block = block_of((5, 6, 7, 8, 9, 10, 11, 12))
    block.record_run(whole_plan("full", window=at("0-7"), reads=at("7"), layers=2))
    block.tokens[3] = 30  # changed: its drift means nothing
    plan = StepPlan("sub", at("1-3"), at("3"), (LayerPositions(14, 14, at("2-3")), LayerPositions(8, 14, 8)))
    for _ in range(2):
        block.record_drift(plan, np.array([0.1, 0.3, 9.0]))
    assert block.history.drift.tolist() == [-1, 0.1, 0.3, -1, -1, -1, -1, -1]
    assert block.history.drift_since_run.tolist() == pytest.approx([0, 0.2, 0.6, 0, 0, 0, 0, 0])
    assert block.drift_since_full == pytest.approx(0.4)
    block.record_run(plan)
    assert block.history.drift_since_run.tolist() == pytest.approx([0, 0.2, 0, 0, 0, 0, 0, 0])
    assert block.drift_since_full == pytest.approx(0.4)
    block.record_run(whole_plan("full", window=at("0-7"), reads=at("7"), layers=2))
    assert block.drift_since_full == 0


@pytest.mark.parametrize(
    ("unmasked", "step", "steps", "expected"),
    [
        ({0: "0", 1: "1-2", 2: "3"}, 3, 0, "none"),
        ({0: "0", 1: "1-2", 2: "3"}, 3, 1, "3"),
        ({0: "0", 1: "1-2", 2: "3"}, 3, 2, "1-3"),
        ({0: "0", 2: "3"}, 4, 2, "3"),
        ({0: "0", 2: "3"}, 4, 4, "0,3"),
    ],
)
def test_what_was_unmasked_in_the_last_steps(unmasked: dict[int, str], step: int, steps: int, expected: str) -> None:
    assert describe(seen("4-7", step=step, unmasked=unmasked).unmasked_within(steps)) == expected


def test_what_a_view_shows() -> None:
    view = seen("2,5-7", sub_block=2, confidence={2: 0.1, 5: 0.2})
    assert [describe(each) for each in (view.sub_block, view.candidates)] == ["2-3", "2"]
    assert view.is_proposed(at("2,5"))
    assert not view.is_proposed(at("2,6"))


STOP = 2


@pytest.mark.parametrize(
    ("known", "limit", "expected"),
    [
        ((), 9, None),
        ((7,), 9, None),
        ((7, STOP, 8), 9, ("stop", 20)),
        ((7, 8), 2, ("length", 20)),
        ((7, STOP), 2, ("stop", 20)),
        ((7, 8, STOP), 2, ("length", 20)),  # behind the limit
        ((7,), 2, None),
        ((), 0, ("length", 18)),
        ((7, 8, 9, 7, 8, 9), 7, None),
        ((7, 8, 9, 7, 8, 9), 6, ("length", 24)),
    ],
)
def test_where_a_sample_ends(known: tuple[int, ...], limit: int, expected: tuple[str, int] | None) -> None:
    """The prompt's eighteen tokens hold a stop token themselves: sixteen are context, the others open the block."""
    prompt = (*range(3, 19), STOP, 5)
    sample = Sample(0, Request(prompt, limit, b""), 0, list(prompt[:16]), block_of((*prompt[16:], *known)))
    sample.ending = ending_of(sample, (STOP,))
    assert sample.ending == expected
    assert sample.generated == list(known)[: limit if expected is None else expected[1] - 18]
    assert sample.is_finished == (expected is not None)


def test_random_numbers_belong_to_an_identity_or_else_to_the_prompt() -> None:
    keys = [request_key((1, 2), None), request_key((1, 2), "a"), request_key((3,), "a"), request_key((12,), None)]
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3
    assert request_key((3,), "prompt:3") != request_key((3,), None)


def test_a_writer_writes_what_is_proposed() -> None:
    assert Writer().write(5, 7, np.empty(0)) == 7
    assert Writer().targets(5) == ()
