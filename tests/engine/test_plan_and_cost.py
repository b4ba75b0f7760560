"""The figures that are summed from records."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepsaver.engine.cost import trace_cost
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace


def decode(model: Transformer, *rules: str, batch_size: int = 2) -> Trace:
    decoding = resolve_decoding(model.config, sub_block_size=4, stop_ids=())
    reuse = tuple(map(parse_rule, rules))
    engine = Engine(model, decoder=Denoise(Threshold(0.9), reuse), batch_size=batch_size, decoding=decoding)
    trace = Trace()
    list(engine.generate([(5, 6, 7), tuple(range(10, 29))], max_new_tokens=20, trace=trace))
    return trace


@pytest.mark.parametrize("rules", [(), ("layer_reuse:k=2,layers=all,mode=delta",), ("window", "trim")])
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
