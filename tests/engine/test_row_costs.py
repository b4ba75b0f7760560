"""What rows take on a machine, and what that predicts: properties of any profile, on made-up and on real traces."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.row_costs import (
    Planning,
    RowCosts,
    predicted_seconds,
    predicted_speed_up_here,
    predicted_total,
    row_costs_from_json,
)
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import ForwardRecord, LayersRun, SampleStep, Trace

LAYERS = 3


def line(fixed: float, each_row: float, rows: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(fixed + each_row * count for count in rows)


def made_up(rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32), *, fixed: float = 1.0, each_row: float = 0.25) -> RowCosts:
    """A machine on which everything is a line."""
    return RowCosts(
        device="made up",
        dtype="float32",
        weights="32 bits",
        threads=1,
        shape="small",
        layers=LAYERS,
        keys_values_share=0.25,
        rows=rows,
        forward=line(fixed, each_row, rows),
        attention=line(fixed, each_row, rows),
        mlp=line(fixed, each_row, rows),
        head=line(fixed, each_row, rows),
        context_row=0.001,
        tick=0.5,
        sample=0.125,
        step=0.0625,
        measuring=1.0,
        rule=0.03,
        history=0.07,
        cached_row=0.002,
    )


def entry(rows: int, *, sample: int = 0, context: int = 0, reads: int | None = None) -> SampleStep:
    """All layers on some rows, of which some are read; only these go on after the last layer's keys and values."""
    reads = rows if reads is None else reads
    run = (LAYERS - 1) * rows + reads
    return SampleStep(
        sample=sample,
        kind="sub" if rows else "reused",
        step=1,
        step_in_sub_block=1,
        rows=rows,
        first_row=0,
        context=context,
        attention_run=run,
        attention_reused=0,
        keys_values_run=LAYERS * rows,
        mlp_run=run,
        mlp_reused=0,
        head_rows=reads,
        revealed=1,
    )


def record(*entries: SampleStep) -> ForwardRecord:
    ran = LAYERS if any(each.rows for each in entries) else 0
    return ForwardRecord(1.0, 1.0, LayersRun(ran, ran, ran), entries, 0)


rising = st.lists(st.floats(0, 1e3), min_size=6, max_size=6).map(lambda values: tuple(sorted(values)))


@st.composite
def profiles(draw: st.DrawFn) -> RowCosts:
    curves = {name: draw(rising) for name in ("forward", "attention", "mlp", "head")}
    return replace(made_up(), **curves, keys_values_share=draw(st.floats(0, 1)))  # type: ignore[arg-type]


def test_a_whole_forward_is_the_sum_of_its_parts() -> None:
    costs = made_up()
    parts = costs.tick + costs.sample + costs.step + 0.001 * LAYERS * 8 * 40 + 0.002 * LAYERS * 40
    each = 1.0 + 0.25 * 8
    assert predicted_seconds(costs, record(entry(8, context=40))) == pytest.approx(parts + each * (2 + 2 * LAYERS))


@given(profiles(), st.integers(0, 5))
def test_interpolation_hits_what_was_measured(costs: RowCosts, index: int) -> None:
    assert costs.seconds_of(costs.mlp, costs.rows[index]) == pytest.approx(costs.mlp[index])


@given(profiles(), st.floats(0, 2000), st.floats(0, 2000))
def test_more_rows_never_take_less(costs: RowCosts, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert costs.whole_forward(few) <= costs.whole_forward(many) * (1 + 1e-12)


@given(profiles(), st.integers(1, 200), st.integers(0, 200))
def test_a_record_with_more_rows_never_takes_less(costs: RowCosts, rows: int, more: int) -> None:
    few, many = (predicted_seconds(costs, record(entry(each))) for each in (rows, rows + more))
    assert few <= many * (1 + 1e-12)


@given(profiles(), st.integers(1, 8))
def test_a_record_without_rows_costs_planning_alone(costs: RowCosts, samples: int) -> None:
    waiting = record(*(entry(0, sample=index) for index in range(samples)))
    assert predicted_seconds(costs, waiting) == pytest.approx(costs.tick + samples * costs.sample)


def test_every_rule_is_planned_for_every_sample() -> None:
    costs, two = made_up(), record(entry(4, sample=0), entry(4, sample=1))
    assert predicted_seconds(costs, two, Planning(3)) - predicted_seconds(costs, two) == pytest.approx(6 * costs.rule)
    keeping = predicted_seconds(costs, two, Planning(3, keeps_deltas=True))
    assert keeping - predicted_seconds(costs, two, Planning(3)) == pytest.approx(2 * costs.history)


def test_a_context_is_read_once_for_each_step_however_many_its_rows() -> None:
    costs = made_up()
    apart = record(entry(4, sample=0, context=40), entry(4, sample=0, context=40))
    more = predicted_seconds(costs, apart) - predicted_seconds(costs, record(entry(8, context=40)))
    assert more == pytest.approx(costs.step + 0.002 * LAYERS * 40)


def test_costs_that_were_stored_before_everything_was_measured_can_be_read() -> None:
    stored = {name: value for name, value in made_up().as_json().items() if name not in ("rule", "history")}
    assert row_costs_from_json(stored) == replace(made_up(), rule=0.0, history=0.0)
    with pytest.raises(KeyError):
        row_costs_from_json({name: value for name, value in stored.items() if name != "tick"})


def test_several_steps_of_a_sample_are_planned_once_and_packed_each() -> None:
    costs = made_up()
    one, two = (record(entry(4, sample=0), entry(4, sample=sample)) for sample in (0, 1))
    assert predicted_seconds(costs, two) - predicted_seconds(costs, one) == pytest.approx(costs.sample)
    assert predicted_seconds(costs, one) - predicted_seconds(costs, record(entry(8))) == pytest.approx(costs.step)


def test_only_rows_that_are_read_go_through_the_last_layer_and_the_head() -> None:
    costs = made_up()
    fewer = predicted_seconds(costs, record(entry(8))) - predicted_seconds(costs, record(entry(8, reads=2)))
    assert fewer == pytest.approx(6 * 0.25 * (1 + 1 + 0.75))  # head, MLP and what attention is beside keys and values


def test_layers_that_reuse_deltas_are_not_in_the_one_call() -> None:
    """Of three layers, one that all reuse; then one that only one of two samples reuses."""
    costs = replace(made_up(), layer_apart=8.0, layer_reused=2.0)
    reusing = entry(4)._replace(attention_run=8, keys_values_run=8, mlp_run=8, attention_reused=4, mlp_reused=4)
    for beside, layers, more in ((reusing, 2, 2.0), (entry(4, sample=1), 3, 8.0)):
        both = record(reusing, beside)._replace(layers=LayersRun(layers, layers, layers))
        unaware = predicted_seconds(made_up(), both)
        assert predicted_seconds(costs, both) - unaware == pytest.approx(more)
    whole = record(entry(4))
    assert predicted_seconds(costs, whole) == predicted_seconds(made_up(), whole)


def test_rows_that_are_causal_see_half_of_their_own() -> None:
    costs = made_up()
    drafted, verified = (entry(8, context=40)._replace(kind=kind) for kind in ("draft", "verify"))
    saved = predicted_seconds(costs, record(drafted)) - predicted_seconds(costs, record(verified))
    assert saved == pytest.approx(costs.context_row * LAYERS * 8 * 4)


def test_a_context_that_is_run_again_is_a_forward_of_its_own() -> None:
    costs = made_up()
    again = entry(8, context=24)._replace(recomputed_context=16)
    more = predicted_seconds(costs, record(again)) - predicted_seconds(costs, record(entry(8, context=24)))
    each = 1.0 + 0.25 * 16
    seen = LAYERS * 16 * (8 * costs.context_row + costs.cached_row)
    assert more == pytest.approx(costs.step + each * (1 + 2 * LAYERS) + seen)


@pytest.mark.parametrize("rows", [(1,), (1, 2, 4), (1, 2, 4, 8, 16, 32)])
def test_beyond_the_last_row_the_line_goes_on(rows: tuple[int, ...]) -> None:
    costs = made_up(rows, fixed=0.0)
    assert costs.seconds_of(costs.head, 1000) == pytest.approx(250)


@given(profiles())
def test_a_profile_survives_json(costs: RowCosts) -> None:
    assert row_costs_from_json(json.loads(json.dumps(costs.as_json()))) == costs


@pytest.mark.parametrize("wanted", [1, 4, 16, 64])
def test_forward_rows_is_what_a_forward_costs_beside_its_rows(wanted: int) -> None:
    costs = replace(made_up(fixed=wanted * 0.25), tick=0.0, sample=0.0)
    assert costs.forward_rows == wanted


def test_where_rows_are_free_a_forward_is_worth_as_many_as_were_measured() -> None:
    assert made_up(each_row=0.0).forward_rows == 32
    assert made_up(each_row=1e-16).forward_rows == 32  # what a fit of 0 is on some machines
    assert made_up((1,)).forward_rows == 1


def decoded(model: Transformer, policy: str, *rules: str) -> Trace:
    trace = Trace()
    decoding = resolve_decoding(model.config, sub_block_size=4)
    reuse = tuple(map(parse_rule, rules))
    engine = Engine(model, decoder=Denoise(parse_policy(policy), reuse), batch_size=2, decoding=decoding)
    list(engine.generate([[5, 6, 7], [8] * 11, [9]], max_new_tokens=24, trace=trace))
    return trace


def test_a_trace_predicted_with_itself_is_one_and_less_work_takes_less(tiny_model: Transformer) -> None:
    costs = made_up()
    plain = decoded(tiny_model, "fixed")
    reused = decoded(tiny_model, "fixed", "layer_reuse:k=2,layers=0-1,mode=delta")
    assert predicted_speed_up_here(plain, plain, costs) == 1.0
    assert predicted_speed_up_here(plain, reused, costs) > 1.0
    assert predicted_total(costs, plain.records) == pytest.approx(
        sum(predicted_seconds(costs, each) for each in plain.records)
    )


def test_where_rows_are_free_only_forwards_count(tiny_model: Transformer) -> None:
    """The same forwards on fewer rows save nothing then."""
    free = replace(made_up(each_row=0.0), context_row=0.0, tick=0.0, sample=0.0, step=0.0)
    plain, window = decoded(tiny_model, "fixed"), decoded(tiny_model, "fixed", "previous_row:refresh=block")
    assert sum(each.rows for each in window.entries) < sum(each.rows for each in plain.entries)
    assert len(window.records) == len(plain.records)
    assert predicted_speed_up_here(plain, window, free) == pytest.approx(1.0)


def test_drafts_are_longer_where_a_forward_costs_more_rows(tiny_model: Transformer) -> None:
    drafted = {}
    for forward_rows in (1.0, 1024.0):
        trace = Trace()
        engine = Engine(tiny_model, decoder=Speculative(span="auto"), batch_size=1, forward_rows=forward_rows)
        list(engine.generate([[5, 6, 7]], max_new_tokens=24, trace=trace))
        rows = [each.rows for each in trace.entries if each.kind == "draft"]
        drafted[forward_rows] = sum(rows) / len(rows)
    assert drafted[1.0] < drafted[1024.0]


@pytest.mark.parametrize(
    "damage",
    [
        {"forward": ["x"] * 6},
        {"threads": "2"},
        {"device": 5},
        {"mlp": [1.0]},
        {"rows": []},
        {"tick": None},
        {"head": 3.0},
    ],
)
def test_a_profile_of_another_type_is_none(damage: dict) -> None:
    content = json.loads(json.dumps(made_up().as_json()))
    assert row_costs_from_json(content) == made_up()
    with pytest.raises((TypeError, ValueError)):
        row_costs_from_json(content | damage)
