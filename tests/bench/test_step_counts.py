"""Counted steps give the ceiling of the whole trace."""

import json
from pathlib import Path

import pytest
import torch

from stepsaver.bench.step_counts import count_steps, counted_ceiling
from stepsaver.engine.cost import ceiling
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.models.load import load_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.trace import Trace

RULES = ("layer_reuse:k=2,layers=0,mode=delta", "layer_reuse:k=3,layers=0,mode=output", "previous_row", "trim")


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_model(Path(__file__).parent.parent / "golden", dtype=torch.float32)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_ceiling_of_counted_steps_is_that_of_the_trace(model: Transformer, prefix_cache: bool) -> None:
    decoding = resolve_decoding(model.config, prefix_cache=prefix_cache)
    whole, chunks = Trace(), []
    for prompts in ([[5, 6, 7], [8, 9]], [list(range(5, 75))]):
        trace = Trace()
        for _ in Engine(model, batch_size=4, decoding=decoding).generate(prompts, max_new_tokens=64, trace=trace):
            pass
        whole.records += trace.records
        chunks.append(json.loads(json.dumps(count_steps(trace))))
    for rule in RULES:
        engine = Engine(model, decoder=Denoise(rules=(parse_rule(rule),)), batch_size=4, decoding=decoding)
        wanted = ceiling(model.config, whole, engine.decoder.rules, decoding)
        assert counted_ceiling(engine, engine.decoder.rules, chunks) == pytest.approx(wanted, rel=1e-9)
    assert wanted > 1


def test_nothing_decoded_has_no_ceiling(model: Transformer) -> None:
    assert counted_ceiling(Engine(model), (), []) is None
