"""Forwards that are run as one: the same tokens, fewer forwards, and a wrong guess costs a step and nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.batch import resolve_joins
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoders.speculative import Speculative
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.policy import parse_policy
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.rules.rule import parse_rule
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.state import BlockState
from stepsaver.engine.trace import Trace
from tests.conftest import sharpened, straight_curve, tiny_config

RULES = [
    (),
    ("window", "trim"),
    ("suffix_dropout",),
    ("partial_commit:settle=0",),
    ("window", "trim", "suffix_dropout", "partial_commit"),
    ("layer_reuse:k=2,mode=output",),
    ("layer_reuse:k=2,mode=delta",),  # keeps deltas, so that nothing is joined
]


@pytest.fixture(scope="module")
def models() -> dict[str, Transformer]:
    own = {"architecture": "SDARForCausalLM", "predicts": "self", "head_norms": True, "qkv_bias": False}
    return {
        "next": sharpened(random_model(tiny_config(), dtype=torch.float64, seed=5)),
        "self": sharpened(random_model(tiny_config(**own), dtype=torch.float64, seed=3)),
    }


def engine_of(model: Transformer, join: str, rules: tuple[str, ...] = (), **options: Any) -> Engine:
    policy = options.pop("policy", Threshold(options.pop("threshold", 0.6)))
    batch_size = options.pop("batch_size", 1)
    decoding = resolve_decoding(model.config, join=join, **({"sub_block_size": 4, "stop_ids": ()} | options))  # type: ignore[arg-type]
    rules_made = tuple(map(parse_rule, rules))
    return Engine(model, decoder=Denoise(policy, rules_made), batch_size=batch_size, decoding=decoding, checked=True)


def decoded(engine: Engine, prompts: list, trace: Trace | None = None) -> list[Completion]:
    return sorted(engine.generate(prompts, max_new_tokens=0, trace=trace), key=lambda each: each.index)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(["next", "self"]),
    rules=st.sampled_from(RULES),
    join=st.sampled_from(["auto", "on"]),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=4),
    threshold=st.sampled_from([0.3, 0.7, 1.0]),
    stop=st.sampled_from([(), (7, 40)]),
    batch_size=st.integers(1, 3),
)
def test_joined_forwards_write_the_same_text(models, kind, rules, join, lengths, threshold, stop, batch_size) -> None:
    """In float64: every kind of model, rules, ragged batches, stop tokens and limits."""
    if kind == "self":
        rules = tuple(rule for rule in rules if not rule.startswith("window"))
    prompts = [
        Prompt(tuple(3 + (7 * index + length) % 57 for index in range(length)), max_new_tokens=limit)
        for length, limit in lengths
    ]
    options = {"threshold": threshold, "stop_ids": stop, "batch_size": batch_size}
    plain, joined = Trace(), Trace()
    expected = decoded(engine_of(models[kind], "off", rules, **options), prompts, plain)
    found = decoded(engine_of(models[kind], join, rules, **options), prompts, joined)
    assert [(each.ids, each.finish) for each in found] == [(each.ids, each.finish) for each in expected]
    assert plain.guesses_right == plain.guesses_wrong == 0
    wasted = joined.guesses_wrong
    for ours, theirs in zip(found, expected, strict=True):  # an entry per kind, as without; and one per wrong guess
        assert len(ours.steps) <= len(theirs.steps) + wasted
        assert sum(step.unmasked for step in ours.steps) == sum(step.unmasked for step in theirs.steps)
    if batch_size == 1:
        assert joined.forwards <= plain.forwards
    for trace in (plain, joined):
        assert trace.slots_filled <= 1.0


def test_a_prefill_carries_the_first_step(models) -> None:
    trace = Trace()
    (completion,) = decoded(engine_of(models["next"], "auto"), [Prompt(tuple(range(5, 18)), None, 10)], trace)
    assert [entry.kind for entry in trace.records[0].entries] == ["prefill", "full"]
    assert 0 < trace.prefill_seconds < trace.records[0].seconds
    assert [step.kind for step in completion.steps[:2]] == ["prefill", "full"]


def test_a_new_sample_is_prefilled_beside_the_steps_of_the_others(models) -> None:
    prompts = [Prompt(tuple(range(5, 5 + length)), None, limit) for length, limit in ((13, 40), (9, 4), (18, 10))]
    trace, plain = Trace(), Trace()
    found = decoded(engine_of(models["next"], "auto", batch_size=2), prompts, trace)
    shared = next(each for each in trace.records[1:] if any(entry.kind == "prefill" for entry in each.entries))
    assert [(entry.sample, entry.kind) for entry in shared.entries[:2]] == [(2, "prefill"), (2, "full")]
    assert {entry.sample for entry in shared.entries} == {0, 2}
    assert 0 < trace.prefill_seconds < trace.decode_seconds
    assert trace.slots_filled == 1.0
    apart = decoded(engine_of(models["next"], "off", batch_size=2), prompts, plain)
    assert [each.ids for each in apart] == [each.ids for each in found]
    assert trace.forwards < plain.forwards
    assert not any({"prefill", "sub"} <= {entry.kind for entry in record.entries} for record in plain.records)


def test_a_context_that_opens_the_block_cannot_be_joined(models) -> None:
    trace = Trace()
    decoded(engine_of(models["next"], "auto"), [Prompt(tuple(range(5, 21)), None, 10)], trace)
    assert [entry.kind for entry in trace.records[0].entries] == ["prefill"]
    decoded(engine_of(models["self"], "auto"), [Prompt(tuple(range(5, 21)), None, 10)], trace := Trace())
    assert [entry.kind for entry in trace.records[0].entries] == ["prefill", "full"]


def test_commits_are_joined_and_guesses_counted(models) -> None:
    trace, plain = Trace(), Trace()
    prompts = [Prompt((5, 6, 7), None, 45)]
    decoded(engine_of(models["next"], "on"), prompts, trace)
    decoded(engine_of(models["next"], "off"), prompts, plain)
    assert trace.guesses_right + trace.guesses_wrong >= 4
    assert trace.forwards == plain.forwards - trace.guesses_right
    # a model whose rows predict themselves has nothing to guess
    decoded(engine_of(models["self"], "on"), prompts, trace := Trace())
    assert trace.guesses_wrong == 0 < trace.guesses_right


def test_a_wrong_guess_repeats_the_step(models, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [Prompt((5, 6, 7), None, 45)]
    expected = decoded(engine_of(models["next"], "off"), prompts)
    original = BlockState.note

    def wrong(self: BlockState, rows, proposed) -> None:
        original(self, rows, proposed)
        if self.opening is not None:
            self.opening = (self.opening + 1) % 50 + 3

    monkeypatch.setattr(BlockState, "note", wrong)
    trace = Trace()
    found = decoded(engine_of(models["next"], "on"), prompts, trace)
    assert found[0].ids == expected[0].ids
    assert trace.guesses_right == 0 < trace.guesses_wrong
    assert len(found[0].steps) == len(expected[0].steps) + trace.guesses_wrong


@pytest.mark.parametrize("kind", ["next", "self"])
def test_scores_are_the_same_and_never_guessed_wrong(models, kind: str) -> None:
    requests = [
        ScoreRequest(tuple(range(5, 5 + length)), tuple(range(20, 20 + count)))
        for length, count in ((3, 1), (11, 14), (8, 9), (16, 20))
    ]
    trace = Trace()
    joined = sorted(engine_of(models[kind], "on", batch_size=2).score(requests, trace=trace), key=lambda s: s.index)
    plain = sorted(engine_of(models[kind], "off").score(requests), key=lambda s: s.index)
    for one, other in zip(joined, plain, strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-9)
        assert one.is_greedy == other.is_greedy
    assert trace.guesses_wrong == 0 < trace.guesses_right


def test_drafts_begin_beside_the_prefill(models) -> None:
    prompts = [Prompt(tuple(range(5, 18)), None, 20)]
    found = {}
    for join in ("off", "on"):
        trace = Trace()
        decoding = resolve_decoding(models["next"].config, stop_ids=(), join=join)  # type: ignore[arg-type]
        engine = Engine(models["next"], decoder=Speculative(), decoding=decoding, checked=True)
        found[join] = (decoded(engine, prompts, trace)[0].ids, trace.forwards)
    assert found["on"][0] == found["off"][0]
    assert found["on"][1] == found["off"][1] - 1


def test_policies_with_steps_of_their_own_join_too(models) -> None:
    for text in ("fixed:rows=3", "quota:steps=3"):
        options = {"policy": parse_policy(text)}
        prompts = [Prompt(tuple(range(5, 18)), None, 30)]
        joined = decoded(engine_of(models["next"], "on", **options), prompts)
        assert joined[0].ids == decoded(engine_of(models["next"], "off", **options), prompts)[0].ids


@pytest.mark.parametrize(
    ("forward", "batch_size", "expected"),
    [(None, 1, (True, False)), (40.0, 1, (True, True)), (40.0, 32, (True, False)), (1.0, 1, (True, False))],
)
def test_auto_joins_commits_where_the_machine_says_so(forward, batch_size: int, expected) -> None:
    """A forward costs so many positions, and they are on top."""
    curve = None if forward is None else straight_curve(forward)
    assert resolve_joins("auto", curve=curve, batch_size=batch_size, block_size=32) == expected
