"""Scoring by the decode loop, and the reference's estimator."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.score import IN_ONE_FORWARD, Score, ScoreRequest
from stepsaver.engine.trace import Trace
from tests.conftest import GOLDEN
from tests.engine.golden_cases import read_golden

BLOCK = 8


def engine_of(
    model: Transformer, *, rules: tuple[str, ...] = (), batch_size: int = 1, threshold: float = 0.5, **options
):
    decoding = resolve_decoding(model.config, **({"sub_block_size": min(4, model.config.block_size)} | options))
    return Engine(
        model,
        decoder=Denoise(Threshold(threshold), tuple(map(parse_rule, rules))),
        batch_size=batch_size,
        decoding=decoding,
        checked=True,
    )


def scored(engine: Engine, requests: list, **options) -> list[Score]:
    asked = [ScoreRequest(tuple(context), tuple(continuation)) for context, continuation in requests]
    return sorted(engine.score(asked, **options), key=lambda each: each.index)


@pytest.mark.parametrize("number", range(len(read_golden(GOLDEN)["scores"])))
def test_reference_estimator_equals_the_reference(golden_model: Transformer, number: int) -> None:
    case = read_golden(GOLDEN)["scores"][number]
    engine = engine_of(golden_model, sub_block_size=8)
    score = scored(engine, [(case["prefix"], case["target"])], estimator="reference")[0]
    assert score.loglikelihood == pytest.approx(case["first_token_loglikelihood"], abs=1e-3)


def test_scores_of_generated_text_are_greedy_and_take_the_same_steps(tiny_model: Transformer) -> None:
    """A text that the model itself generates is scored along its own trajectory."""
    engine = engine_of(tiny_model, stop_ids=(), threshold=1.0)
    prompt = (5, 6, 7)
    completion = next(iter(engine.generate([prompt], max_new_tokens=2 * BLOCK - 3)))
    score = scored(engine, [(prompt, completion.ids)])[0]
    assert score.is_greedy
    assert score.steps == sum(step.kind in ("full", "sub") for step in completion.steps)
    wrong = [(token + 1) % 61 if token + 1 != 1 else 5 for token in completion.ids]
    assert not scored(engine, [(prompt, wrong)])[0].is_greedy


def test_a_single_token_is_the_log_softmax_of_the_row_before(tiny_model: Transformer) -> None:
    context = tuple(range(5, 5 + BLOCK + 3))
    rows = list(context[BLOCK:]) + [1] * 5
    positions = torch.arange(2 * BLOCK) // BLOCK
    mask = positions[:, None] >= positions[None]
    logits = plain_logits(tiny_model, list(context[:BLOCK]) + rows, mask)
    expected = logits[len(context) - 1].log_softmax(-1)
    scores = scored(engine_of(tiny_model, batch_size=3), [(context, (token,)) for token in (7, 9, 30)])
    for score, token in zip(scores, (7, 9, 30), strict=True):
        assert score.loglikelihood == pytest.approx(float(expected[token]), abs=1e-9)
        assert score.steps == 1


def plain_logits(model: Transformer, ids: list[int], mask: torch.Tensor) -> torch.Tensor:
    h = model.embedding(torch.tensor(ids))
    rotation = model.rotations(len(ids))
    group = model.config.heads // model.config.kv_heads
    for layer in model.layers:
        q, k, v = layer.attention.project_rotated(h, rotation)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        weights = torch.einsum("qhe,khe->hqk", q, k) / model.config.head_dim**0.5
        mixed = torch.einsum("hqk,khe->qhe", weights.masked_fill(~mask, -torch.inf).softmax(-1), v)
        h = h + layer.attention.finish(mixed.flatten(-2))
        h = h + layer.mlp(h)
    return model.logits(h)


def test_a_token_at_a_blocks_first_row_is_scored_by_the_prefill(tiny_model: Transformer) -> None:
    context = tuple(range(5, 5 + BLOCK))
    trace = Trace()
    scores = scored(engine_of(tiny_model, batch_size=4), [(context, (7,)), (context, (9,))], trace=trace)
    mask = torch.ones(BLOCK, BLOCK, dtype=torch.bool)
    expected = plain_logits(tiny_model, list(context), mask)[-1].log_softmax(-1)
    assert [score.loglikelihood for score in scores] == pytest.approx(
        [float(expected[7]), float(expected[9])], abs=1e-9
    )
    assert [entry.kind for entry in trace.entries] == ["prefill"]
    assert [score.steps for score in scores] == [0, 0]


ids = st.integers(3, 60)
requests_strategy = st.lists(
    st.tuples(
        st.sampled_from([(5,), (5, 6, 7), tuple(range(10, 18)), tuple(range(10, 26)), tuple(range(20, 31)), ()]),
        st.lists(ids, max_size=2 * BLOCK + 3).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=requests_strategy,
    batch_size=st.integers(1, 5),
    rules=st.sampled_from([(), ("layer_reuse:k=3,mode=output",), ("window:refresh=block", "trim")]),
)
def test_batching_and_sharing_change_no_score(tiny_model: Transformer, requests, batch_size: int, rules) -> None:
    together = scored(engine_of(tiny_model, rules=rules, batch_size=batch_size), requests)
    assert [score.index for score in together] == list(range(len(requests)))
    for request, score in zip(requests, together, strict=True):
        alone = scored(engine_of(tiny_model, rules=rules), [request])[0]
        assert score.loglikelihood == pytest.approx(alone.loglikelihood, abs=1e-9)
        assert (score.is_greedy, score.steps) == (alone.is_greedy, alone.steps)
        if not request[1]:
            assert (score.loglikelihood, score.is_greedy) == (0.0, True)


def test_requests_with_the_same_context_share_its_prefill(tiny_model: Transformer) -> None:
    context = tuple(range(3, 3 + 3 * BLOCK + 2))
    several = [(context, (token, token + 1, 9)) for token in (5, 15, 25, 35)]
    trace = Trace()
    scored(engine_of(tiny_model, batch_size=4), several, trace=trace)
    assert [entry.rows for entry in trace.entries if entry.kind == "prefill"] == [3 * BLOCK]
    trace = Trace()
    scored(engine_of(tiny_model, batch_size=4), [(context, (token,)) for token in (5, 15, 25, 35)], trace=trace)
    assert [entry.kind for entry in trace.entries] == ["prefill", "full"]
    assert trace.tokens_scored == 4


@pytest.mark.parametrize("estimator", ["reference", "autoregressive"])
def test_requests_that_show_the_same_rows_share_their_one_forward(tiny_model: Transformer, estimator: str) -> None:
    """One-token choices do; a longer continuation, another context and a repeated request are in the same batch."""
    context = tuple(range(3, 3 + BLOCK + 2))
    requests = [(context, (token,)) for token in (5, 15, 25)]
    requests += [(context, (5, 6)), (context[1:], (5,)), (context, (15,)), (context, (5, 7))]
    engine, trace = engine_of(tiny_model, batch_size=3), Trace()
    found = scored(engine, requests, trace=trace, estimator=estimator)
    own = len({prepared(request, engine, estimator) for request in requests})
    assert [entry.sample for entry in trace.entries] == list(range(own))
    assert own < len(requests)
    assert trace.tokens_scored == sum(len(continuation) for _, continuation in requests)
    for request, score in zip(requests, found, strict=True):
        (alone,) = scored(engine_of(tiny_model), [request], estimator=estimator)
        assert score.loglikelihood == pytest.approx(alone.loglikelihood, abs=1e-9)
        assert score.is_greedy == alone.is_greedy


@pytest.mark.parametrize("estimator", ["reference", "autoregressive"])
@pytest.mark.parametrize("rule", ["layer_reuse:layers=all,k=2", "adaptive_layers:probe=1,threshold=0.5"])
def test_rules_that_keep_deltas_change_no_score_of_one_forward(
    tiny_model: Transformer, estimator: str, rule: str
) -> None:
    """A context is longer than the deltas of a block."""
    requests = [(tuple(range(3, 6 + 5 * count)), (7, 9, 11)[: 1 + count % 3]) for count in range(1, 10)]
    plain = scored(engine_of(tiny_model, batch_size=2), requests, estimator=estimator)
    assert scored(engine_of(tiny_model, batch_size=2, rules=(rule,)), requests, estimator=estimator) == plain


def prepared(request: tuple, engine: Engine, estimator: str) -> object:
    return IN_ONE_FORWARD[estimator](ScoreRequest(*request), engine.decoding).shown  # type: ignore[index]


def test_output_reuse_changes_scores_and_k1_does_not(tiny_model: Transformer) -> None:
    requests = [((5, 6, 7), tuple(range(10 + shift, 22 + shift))) for shift in range(8)]
    plain = scored(engine_of(tiny_model, threshold=1.0), requests)
    same = scored(engine_of(tiny_model, threshold=1.0, rules=("layer_reuse:k=1,mode=output",)), requests)
    reused = scored(engine_of(tiny_model, threshold=1.0, rules=("layer_reuse:k=3,mode=output",)), requests)
    assert same == plain
    assert all(a.loglikelihood != b.loglikelihood for a, b in zip(plain, reused, strict=True))


def test_score_stop_appends_the_stop_token(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    with_stop = scored(engine, [((5, 6), (7, 8))], score_stop=True)[0]
    assert with_stop.loglikelihood == scored(engine, [((5, 6), (7, 8, 2))])[0].loglikelihood


@pytest.mark.parametrize("estimator", ["trajectory", "reference", "autoregressive"])
@pytest.mark.parametrize("best_at", range(3))
def test_of_several_continuations_only_the_most_likely_is_greedy(
    tiny_model: Transformer, estimator: str, best_at: int
) -> None:
    engine, context = engine_of(tiny_model, batch_size=2), tuple(range(5, 16))
    everything = scored(engine, [(context, (token,)) for token in range(3, 61)], estimator=estimator)
    best = max(everything, key=lambda each: each.loglikelihood).index + 3
    assert [each.index + 3 for each in everything if each.is_greedy] == [best]
    tokens = [token for token in (7, 8) if token != best][:2]
    tokens.insert(best_at, best)
    found = scored(engine, [(context, (token,)) for token in tokens], estimator=estimator)
    assert [each.is_greedy for each in found] == [token == best for token in tokens]


@pytest.mark.parametrize(("context", "score_stop"), [(503, False), (502, True)])
def test_a_request_that_just_fits_is_scored_and_one_token_more_is_not(
    tiny_model: Transformer, context: int, score_stop: bool
) -> None:
    """Of 512 positions, nine are the continuation's."""
    engine = engine_of(tiny_model)
    assert len(scored(engine, [((5,) * context, (6,) * 9)], score_stop=score_stop, estimator="autoregressive")) == 1
    with pytest.raises(UsageError, match=f"context: {context + 1} tokens and .* exceed the model's 512 positions"):
        engine.score([ScoreRequest((5,) * (context + 1), (6,) * 9)], score_stop=score_stop)


@pytest.mark.parametrize(
    ("request_ids", "message"),
    [
        (((5, 99), (6,)), "context: id 99"),
        (((5,), (6, 61)), "continuation: id 61"),
    ],
)
def test_wrong_requests_are_refused(tiny_model: Transformer, request_ids, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scored(engine_of(tiny_model), [request_ids])


def test_unknown_estimator_is_refused(tiny_model: Transformer) -> None:
    with pytest.raises(UsageError, match="nearest: reference"):
        scored(engine_of(tiny_model), [((5,), (6,))], estimator="referenc")
