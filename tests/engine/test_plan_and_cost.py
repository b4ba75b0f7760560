"""Row sets, plans, and the figures that are summed from records."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepsaver.engine.base_plan import commit_plan, prefill_plan
from stepsaver.engine.cost import COMPUTE_BOUND, Machine, ceiling, predicted_speed_up, trace_cost
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.plan import empty_plan, whole_plan
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rows import describe, first_row, is_subset, row_index, row_list, row_set, row_sets, rows_between
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace

rows = st.sets(st.integers(0, 40)).map(lambda chosen: sum(1 << row for row in chosen))


@given(rows, rows)
def test_row_sets_behave_like_sets(one: int, other: int) -> None:
    assert row_list(one) == tuple(sorted(row_list(one)))
    assert is_subset(one, other) == (set(row_list(one)) <= set(row_list(other)))
    assert row_index(one).tolist() == list(row_list(one))
    flags = torch.zeros(41, dtype=torch.bool).numpy()
    flags[row_index(one)] = True
    assert row_set(flags) == one
    both = np.stack([flags, np.isin(np.arange(41), row_list(other))])
    assert row_sets(both) == [one, other]
    if one:
        assert first_row(one) == min(row_list(one))


@given(rows)
def test_descriptions_name_exactly_the_rows(chosen: int) -> None:
    named: list[int] = []
    for item in describe(chosen).split(",") if chosen else []:
        start, _, stop = item.partition("-")
        named += range(int(start), int(stop or start) + 1)
    assert tuple(named) == row_list(chosen)


@given(rows.filter(bool), rows)
def test_plans_compare_by_work(window: int, other: int) -> None:
    plan = whole_plan("full", window=window, reads=window, layers=4)
    narrowed = plan.within(other)
    assert narrowed <= plan
    assert (plan <= narrowed) == is_subset(window, other)
    assert empty_plan(4) <= plan
    assert hash(plan) == hash(whole_plan("full", window=window, reads=window, layers=4))


def test_a_plan_prints_as_one_line() -> None:
    text = str(commit_plan(32, layers=28))
    assert text == (
        "commit: rows 0-31; layers 0-26 attention 0-31 keys 0-31 mlp 0-31; "
        "layers 27-27 attention 31 keys 0-31 mlp 31; head 31"
    )
    assert str(empty_plan(3)) == "reused: no forward"
    assert prefill_plan(64, reads_last=False, layers=2).reads == 0
    assert commit_plan(32, layers=28).mlp_run == 27 * 32 + 1
    assert rows_between(2, 4) == 0b1100


def decode(model: Transformer, *rules: str, batch_size: int = 2) -> Trace:
    decoding = resolve_decoding(model.config, sub_block_size=4, stop_ids=())
    reuse = tuple(map(parse_rule, rules))
    engine = Engine(model, policy=Threshold(0.9), rules=reuse, batch_size=batch_size, decoding=decoding)
    trace = Trace()
    list(engine.generate([(5, 6, 7), tuple(range(10, 29))], max_new_tokens=20, trace=trace))
    return trace


@pytest.mark.parametrize("rules", [(), ("layer_reuse:k=2,layers=all,mode=delta",), ("previous_row", "trim")])
def test_operations_are_those_that_torch_counts(tiny_model: Transformer, rules: tuple[str, ...]) -> None:
    """An independent count of every matrix multiplication, attention included; alone, so that nothing is padded."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trace = decode(tiny_model, *rules, batch_size=1)
    cost = trace_cost(tiny_model.config, trace, bytes_per_number=8)
    assert cost.flops == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_sums_agree_with_the_records(tiny_model: Transformer) -> None:
    trace = decode(tiny_model)
    cost = trace_cost(tiny_model.config, trace, bytes_per_number=8)
    assert cost.forwards == len(trace.records)
    assert cost.rows == sum(entry.rows for record in trace.records for entry in record.entries)
    assert cost.mlp_row_layers_reused == cost.attention_row_layers_reused == 0
    assert trace.tokens_generated == 40
    assert 0 < trace.prefill_seconds < trace.decode_seconds
    assert trace.cache_bytes == 2 * 3 * 2 * 40 * 2 * 8 * 8  # k and v, layers, slots, rows, heads, width, bytes


def test_head_and_last_layer_run_only_on_rows_that_are_read(tiny_model: Transformer) -> None:
    trace = decode(tiny_model)
    for entry in trace.entries:
        assert entry.mlp_run == 2 * entry.rows + entry.head_rows
        assert entry.keys_values_run == 3 * entry.rows
        assert entry.head_rows <= 4


def test_predicted_speed_up_follows_the_scarce_resource(tiny_model: Transformer) -> None:
    plain, reused = decode(tiny_model), decode(tiny_model, "previous_row", "trim")
    config = tiny_model.config
    assert predicted_speed_up(config, plain, plain) == 1.0
    by_compute = predicted_speed_up(config, plain, reused, machine=COMPUTE_BOUND)
    by_bytes = predicted_speed_up(config, plain, reused, machine=Machine(float("inf"), 1.0))
    assert by_compute > 1.0
    assert by_compute != by_bytes


@pytest.mark.parametrize(
    "rules",
    [
        ("layer_reuse:k=2,layers=all,mode=delta",),
        ("layer_reuse:k=3,layers=first,mode=mlp",),
        ("layer_reuse:k=3,layers=all,mode=output",),
        ("previous_row:refresh=block",),
        ("trim:level=changed",),
        ("previous_row:refresh=sub-block", "trim:level=structural"),
        ("adaptive_layers:probe=1,threshold=9",),
    ],
)
def test_no_rule_set_beats_its_ceiling(tiny_model: Transformer, rules: tuple[str, ...]) -> None:
    """At threshold 1 every trace has the same steps up to a few, so operations per step can be compared."""
    decoding = resolve_decoding(tiny_model.config, sub_block_size=4, stop_ids=())
    reuse = tuple(map(parse_rule, rules))
    bound = ceiling(tiny_model.config, decode(tiny_model), reuse, decoding)
    assert 1.0 < bound < float("inf")
    assert predicted_speed_up(tiny_model.config, decode(tiny_model), decode(tiny_model, *rules)) <= bound * 1.05
