"""Autoregressive decoding: the text of blocks of one position, one forward per token."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.decoders.autoregressive import Autoregressive
from stepsaver.engine.decoders.chosen import parse_decoder
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import Trace
from tests.conftest import GOLDEN, SHARED, sharpened, tiny_config
from tests.engine.golden_cases import read_golden

CHECKPOINTS = [
    GOLDEN,
    *(SHARED / "golden" / name for name in ("tied-12", "untied-28")),
    *sorted(each.parent for each in (SHARED / "golden_sdar").glob("*/config.json")),
]


@pytest.fixture(scope="module", params=["next", "self"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return sharpened(random_model(tiny_config(predicts=request.param), dtype=torch.float64, seed=5), factor=12.0)


def completions(
    model: Transformer, prompts: list, limit: int, decoder: Decoder | None = None, *, batch_size: int = 1, **options
) -> list[Completion]:
    """With no decoder, in blocks of one position."""
    run = {name: options.pop(name) for name in ("sampling", "trace", "finished") if name in options}
    if decoder is None:
        options |= {"block_size": 1, "sub_block_size": 1}
    decoding = resolve_decoding(model.config, **({"stop_ids": (), "join": "off"} | options))
    engine = Engine(model, decoder=decoder, batch_size=batch_size, decoding=decoding, checked=True)
    return sorted(engine.generate(prompts, max_new_tokens=limit, **run), key=lambda each: each.index)


def ids(*arguments, **options) -> list[list[int]]:
    return [each.ids for each in completions(*arguments, **options)]


@pytest.mark.parametrize("sampling", [None, Sampling(0.8, 0.9, seed=3)])
@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_golden_checkpoints_write_the_text_of_blocks_of_one(folder, sampling: Sampling | None) -> None:
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    model = load_model(folder, dtype=torch.float64)
    cases = read_golden(folder)["cases"][:6]
    prompts = [tuple(prompt) for case in cases for prompt in case.get("prompts") or [case["prompt"]]]
    expected = ids(model, prompts, 24, sampling=sampling, batch_size=4)
    assert ids(model, prompts, 24, Autoregressive(), sampling=sampling, batch_size=4) == expected
    if sampling is None and model.config.predicts == "next":
        assert ids(model, prompts, 24, Speculative(), batch_size=4) == expected


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    stop=st.sampled_from([(), (7,), (3, 40)]),
    join=st.sampled_from(["off", "on"]),
    prefix_cache=st.booleans(),
    sampling=st.sampled_from([Sampling(), Sampling(1.0, seed=4)]),
    seed=st.integers(0, 3),
)
def test_the_text_is_that_of_blocks_of_one(
    model: Transformer, lengths, batch_size: int, stop, join: str, prefix_cache: bool, sampling: Sampling, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    prompts = [Prompt(tuple(draw.integers(3, 60, length).tolist()), max_new_tokens=limit) for length, limit in lengths]
    options = {"stop_ids": stop, "prefix_cache": prefix_cache, "sampling": sampling}
    expected = ids(model, prompts, 0, **options)
    assert ids(model, prompts, 0, Autoregressive(), batch_size=batch_size, join=join, **options) == expected


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_forward_makes_a_token_whatever_the_blocks(model: Transformer, block_size: int) -> None:
    trace = Trace()
    options = {"block_size": block_size, "sub_block_size": 1, "trace": trace}
    (made,) = completions(model, [(5, 6, 7)], 12, Autoregressive(), **options)
    steps = [(step.kind, step.rows, step.head_rows, step.unmasked, step.context) for step in made.steps]
    if model.config.predicts == "next":  # the prompt's last token predicts the first one
        assert steps == [("prefill", 3, 1, 1, 3), *(("commit", 1, 1, 1, 4 + index) for index in range(11))]
    else:  # a masked position predicts its own token, beside the last token from the second one on
        assert steps == [
            ("prefill", 3, 0, 0, 3),
            ("commit", 1, 1, 1, 4),
            *(("commit", 2, 1, 1, 5 + index) for index in range(11)),
        ]
    assert trace.forwards == len(steps)
    assert (trace.tokens_generated, trace.samples) == (12, 1)


def test_a_joined_prefill_saves_a_forward_where_a_position_predicts_itself(model: Transformer) -> None:
    forwards = []
    for join in ("off", "on"):
        trace = Trace()
        completions(model, [(5, 6, 7)], 12, Autoregressive(), join=join, trace=trace)
        forwards.append(trace.forwards)
    assert forwards == ([12, 12] if model.config.predicts == "next" else [13, 12])


@pytest.mark.parametrize("text", ["autoregressive", "speculative:positions=0,span=3", "speculative:positions=20"])
def test_a_stop_string_is_looked_for_after_every_token(model: Transformer, text: str) -> None:
    """In text order, and by every decoder that writes from left to right."""
    decoder = parse_decoder(text)
    prompt = tuple(range(5, 16))
    (whole,) = ids(model, [prompt], 30, Autoregressive())
    for length in (1, 2, 9, 14, 30):
        seen: list[list[int]] = []

        def finished(tokens: list[int], length: int = length, seen: list[list[int]] = seen) -> bool:
            seen.append(tokens)
            return len(tokens) >= length

        (made,) = completions(model, [prompt], 30, decoder, finished=finished)
        assert made.ids == whole[:length]
        assert made.finish == ("stop" if length < 30 else "length")
        assert seen == [whole[:count] for count in range(1, min(length, 29) + 1)]


def test_blocks_of_one_look_for_a_stop_string_too(tiny_model: Transformer) -> None:
    (whole,) = ids(tiny_model, [(5, 6, 7)], 30)
    (made,) = ids(tiny_model, [(5, 6, 7)], 30, finished=lambda tokens: len(tokens) >= 9)
    assert made == whole[:9]


def test_what_has_settled_only_grows(model: Transformer) -> None:
    engine = Engine(model, decoder=Autoregressive(), decoding=resolve_decoding(model.config, stop_ids=()))
    pieces = [settled.ids for settled in engine.stream([(5, 6, 7)], max_new_tokens=6)]
    assert [len(each) for each in pieces] == [1, 2, 3, 4, 5, 6]
    assert all(one == other[: len(one)] for one, other in pairwise(pieces))


def test_a_trajectory_is_the_likelihood_of_the_text(model: Transformer) -> None:
    asked = [ScoreRequest((5, 6, 7), (8, 9, 10)), ScoreRequest(tuple(range(5, 30)), (11,)), ScoreRequest((4,), (1,))]
    of_one = resolve_decoding(model.config, stop_ids=(), block_size=1)
    found = []
    for decoder, decoding in ((Autoregressive(), resolve_decoding(model.config, stop_ids=())), (None, of_one)):
        engine = Engine(model, decoder=decoder, decoding=decoding, batch_size=2, checked=True)
        scores = sorted(engine.score(asked), key=lambda each: each.index)
        found.append([(round(each.loglikelihood, 9), each.is_greedy) for each in scores])
    assert found[0] == found[1]
