"""The decode loop against its oracle: the same sample alone, its context recomputed in every forward, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.sampling import NonFiniteLogits, Sampling
from stepsaver.engine.trace import Trace
from tests.conftest import GOLDEN, sharpened, tiny_config
from tests.engine.golden_cases import decode_case, read_golden

BLOCK = 8


def engine_of(model: Transformer, *, batch_size: int = 1, threshold: float = 0.5, **decoding: object) -> Engine:
    return Engine(
        model,
        decoder=Denoise(Threshold(threshold)),
        batch_size=batch_size,
        decoding=resolve_decoding(model.config, **({"sub_block_size": 4} | decoding)),  # type: ignore[arg-type]
    )


def generate(engine: Engine, prompts: list, max_new_tokens: int, **options: object) -> list[Completion]:
    completions = engine.generate(prompts, max_new_tokens=max_new_tokens, **options)  # type: ignore[arg-type]
    return sorted(completions, key=lambda each: each.index)


def oracle(model: Transformer, prompt: tuple[int, ...], limit: int, **options: object) -> Completion:
    """Alone, and nothing of the context kept between forwards."""
    return generate(engine_of(model, prefix_cache=False, **options), [prompt], limit)[0]  # type: ignore[arg-type]


prompt_ids = st.lists(st.integers(3, 60), min_size=1, max_size=3 * BLOCK).map(tuple)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(prompt_ids, min_size=1, max_size=7),
    limit=st.integers(0, 30),
    threshold=st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
    block_cache=st.booleans(),
    sub_block_size=st.sampled_from([1, 2, 4, 8]),
    batch_size=st.integers(1, 4),
    stops=st.lists(st.integers(3, 60), max_size=12).map(tuple),
)
def test_batched_and_cached_equals_oracle(
    tiny_model: Transformer,
    prompts: list,
    limit: int,
    threshold: float,
    block_cache: bool,
    sub_block_size: int,
    batch_size: int,
    stops: tuple[int, ...],
) -> None:
    options = {
        "threshold": threshold,
        "block_cache": block_cache,
        "sub_block_size": sub_block_size,
        "stop_ids": stops,
    }
    together = generate(engine_of(tiny_model, batch_size=batch_size, **options), prompts, limit)
    for prompt, completion in zip(prompts, together, strict=True):
        alone = oracle(tiny_model, prompt, limit, **options)
        assert (completion.ids, completion.finish) == (alone.ids, alone.finish)
        assert len(completion.ids) <= limit
        assert tiny_model.config.mask_id not in completion.ids


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("block_cache", [True, False])
def test_prompt_lengths_around_blocks(tiny_model: Transformer, length: int, block_cache: bool) -> None:
    prompt = tuple(3 + (7 * place) % 50 for place in range(length))
    options = {"block_cache": block_cache, "stop_ids": ()}
    cached = generate(engine_of(tiny_model, **options), [prompt], 20)[0]
    assert cached.ids == oracle(tiny_model, prompt, 20, **options).ids
    assert len(cached.ids) == 20
    assert (cached.steps[0].kind == "prefill") == (length >= BLOCK)


def test_a_shorter_limit_gives_a_prefix(tiny_model: Transformer) -> None:
    """A block that the limit cuts is decoded like any other, up to the sub-block that holds the limit."""
    engine = engine_of(tiny_model, stop_ids=())
    longest = generate(engine, [(5, 6, 7)], 40)[0].ids
    for limit in range(40):
        shorter = generate(engine, [(5, 6, 7)], limit)[0]
        assert shorter.ids == longest[:limit]
        assert shorter.finish == "length"


def test_sub_blocks_behind_the_limit_are_not_run(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model, stop_ids=(), threshold=1.0)
    steps = generate(engine, [(5,) * BLOCK], 2)[0].steps
    assert [step.kind for step in steps] == ["prefill", "full"]
    assert all(step.first_position in (None, 0) for step in steps)


def test_a_sample_ends_when_its_text_is_known_and_without_a_commit(tiny_model: Transformer) -> None:
    free = generate(engine_of(tiny_model, stop_ids=()), [(5, 6, 7)], 40)[0]
    stop = free.ids[2]
    trace = Trace()
    ended = generate(engine_of(tiny_model, stop_ids=(stop,)), [(5, 6, 7)], 40, trace=trace)[0]
    assert ended.finish == "stop"
    assert trace.tokens_generated == len(ended.ids) < 40
    assert ended.ids == free.ids[: free.ids.index(stop) + 1]
    assert "commit" not in [step.kind for step in ended.steps]
    assert len(ended.steps) < len(free.steps)


def test_all_samples_end_at_once_and_waiting_ones_follow(tiny_model: Transformer) -> None:
    prompts = [(9, 10, 11)] * 7
    trace = Trace()
    engine = engine_of(tiny_model, batch_size=3, stop_ids=())
    completions = generate(engine, prompts, 12, trace=trace)
    assert len({tuple(each.ids) for each in completions}) == 1
    assert max(len(record.entries) for record in trace.records) == 3
    assert trace.samples == 7
    assert trace.tokens_generated == 7 * 12


def test_places_are_refilled_at_once(tiny_model: Transformer) -> None:
    prompts = [(3 + place,) * (1 + place % 11) for place in range(20)]
    trace = Trace()
    list(engine_of(tiny_model, batch_size=4).generate(prompts, max_new_tokens=25, trace=trace))
    busy = [record for record in trace.records if record.waiting and record.entries[0].kind != "prefill"]
    assert busy
    assert all(len(record.entries) == 4 for record in busy)
    assert trace.slots_filled == 1.0


def test_order_of_the_batch_does_not_matter_in_float32_on_golden_cases(golden_model: Transformer) -> None:
    for case in read_golden(GOLDEN)["cases"]:
        if len(case["prompts"]) == 1:
            continue
        forward = decode_case(golden_model, case, batch_size=4)
        backward = decode_case(golden_model, case | {"prompts": case["prompts"][::-1]}, batch_size=2)
        assert [each.ids for each in forward] == [each.ids for each in backward[::-1]]


def test_empty_prompt_is_the_bos_token(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    assert generate(engine, [()], 9)[0].ids == generate(engine, [(3,)], 9)[0].ids
    without = random_model(tiny_config(bos_id=None), dtype=torch.float64)
    with pytest.raises(UsageError, match="bos"):
        engine_of(without).generate([()], max_new_tokens=3)


def test_a_mask_token_in_the_prompt_is_a_given_token(tiny_model: Transformer) -> None:
    completion = generate(engine_of(tiny_model, stop_ids=()), [(5, 1, 7, 1)], 16)[0]
    assert len(completion.ids) == 16


def test_model_that_prefers_the_mask_still_ends() -> None:
    """The reference loops for ever when the mask is the model's best guess."""
    model = sharpened(random_model(tiny_config(), dtype=torch.float64, seed=5))
    with torch.no_grad():
        model.head.weight[1] = 5 * model.head.weight.abs().sum(0)
        model.norm.weight.abs_()
    model.prepare()
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.3, seed=3)):
        completion = generate(engine_of(model, stop_ids=()), [(5, 6)], 20, sampling=sampling)[0]
        assert len(completion.ids) == 20
        assert 1 not in completion.ids


def test_blocks_of_one_row_are_autoregressive_decoding(tiny_model: Transformer) -> None:
    completion = generate(engine_of(tiny_model, block_size=1, sub_block_size=1, stop_ids=()), [(5, 6, 7)], 10)[0]
    assert [step.kind for step in completion.steps] == ["prefill"] + ["commit"] * 9
    context = [5, 6, 7]
    for token in completion.ids:
        assert token == _next_token(tiny_model, context)
        context.append(token)


def _next_token(model: Transformer, ids: list[int]) -> int:
    """The arg-max behind a plain causal forward, written without the engine."""
    count = len(ids)
    rotation = model.rotations(count)
    h = model.embedding(torch.tensor(ids))
    for layer in model.layers:
        q, k, v = layer.attention.project_rotated(h, rotation)  # type: ignore[union-attr]
        group = model.config.heads // model.config.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhe,khe->hqk", q, k) / model.config.head_dim**0.5
        scores = scores.masked_fill(torch.triu(torch.ones(count, count, dtype=torch.bool), 1), -torch.inf)
        mixed = torch.einsum("hqk,khe->qhe", scores.softmax(-1), v)
        h = h + layer.attention.finish(mixed.flatten(-2))  # type: ignore[union-attr]
        h = h + layer.mlp(h)  # type: ignore[union-attr]
    logits = model.logits(h[-1:])[0]
    logits[1] = -torch.inf
    return int(logits.argmax())


def test_long_prompts_are_prefilled_in_chunks(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tuple(3 + (5 * place) % 57 for place in range(length)) for length in (70, 9, 33, 64)]
    engine = engine_of(tiny_model, batch_size=4, stop_ids=())
    expected = [each.ids for each in generate(engine, prompts, 12)]
    monkeypatch.setattr("stepsaver.engine.prefill.PREFILL_ROWS", 3 * BLOCK)
    chunked = generate(engine, prompts, 12)
    assert [each.ids for each in chunked] == expected
    assert [step.rows for step in chunked[0].steps if step.kind == "prefill"] == [24, 24, 16]


def test_a_sample_whose_context_is_done_does_not_wait_for_the_others(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepsaver.engine.prefill.PREFILL_ROWS", 3 * BLOCK)
    prompts = [tuple(range(3, 3 + length)) for length in (20, 45)]
    engine, trace = engine_of(tiny_model, batch_size=2, stop_ids=(), join="auto"), Trace()
    list(engine.generate(prompts, max_new_tokens=12, trace=trace))
    last = [record for record in trace.records if any(entry.kind == "prefill" for entry in record.entries)][-1]
    assert {entry.sample for entry in last.entries if entry.kind != "prefill"} == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_non_finite_logits_name_the_step(dtype: torch.dtype) -> None:
    model = random_model(tiny_config(), dtype=dtype)
    with torch.no_grad():
        model.layers[1].mlp.down.weight[3, 4] = torch.nan  # type: ignore[union-attr]
    model.prepare()
    with pytest.raises(NonFiniteLogits, match=r"sample 0, block at position 0, step 0 \(full\)"):
        generate(engine_of(model), [(5, 6)], 4)
    with torch.no_grad():
        model.layers[1].mlp.down.weight[3, 4] = 0.0  # type: ignore[union-attr]
        model.head.weight[7] = torch.inf
    model.prepare()
    with pytest.raises(NonFiniteLogits, match="prefill"):
        generate(engine_of(model), [(5,) * BLOCK], 4)


def test_step_events_tell_the_whole_story(tiny_model: Transformer) -> None:
    """Replaying the events of a sample gives its text."""
    events: list[StepEvent] = []

    def keep(event: StepEvent) -> None:
        assert event.unmasked
        assert event.unmasked & ~event.sub_block == 0
        assert not np.isnan(event.confidence[[r for r in range(BLOCK) if event.unmasked >> r & 1]]).any()
        events.append(event)

    completion = generate(engine_of(tiny_model, stop_ids=()), [(5, 6, 7)], 20, on_step=keep)[0]
    denoising = [step for step in completion.steps if step.kind in ("full", "sub")]
    assert len(events) == len(denoising)
    assert [event.plan.kind for event in events] == [step.kind for step in denoising]
    assert [event.unmasked.bit_count() for event in events] == [step.unmasked for step in denoising]
    before = [(1 << BLOCK) - 1, *(event.unmasked for event in events)]  # a new block has no stamps at all
    for step, event, unmasked_before in zip(denoising, events, before, strict=False):
        assert event.changed == (before[0] if step.step == 0 else unmasked_before)


def test_finished_is_asked_after_each_block(tiny_model: Transformer) -> None:
    asked: list[list[int]] = []

    def after_two_blocks(ids: list[int]) -> bool:
        asked.append(ids)
        return len(asked) == 2

    free = generate(engine_of(tiny_model, stop_ids=()), [(5, 6, 7)], 60)[0]
    ended = generate(engine_of(tiny_model, stop_ids=()), [(5, 6, 7)], 60, finished=after_two_blocks)[0]
    assert [len(ids) for ids in asked] == [BLOCK - 3, 2 * BLOCK - 3]
    assert ended.ids == free.ids[: 2 * BLOCK - 3]
    assert ended.finish == "stop"


def test_sampling_depends_on_seed_and_identity_not_on_the_batch(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model, batch_size=3, stop_ids=())
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=11)
    prompts = [(5, 6, 7), (8, 9), (10,) * 12, (5, 6, 7)]
    together = [each.ids for each in generate(engine, prompts, 15, sampling=sampling)]
    alone = [generate(engine_of(tiny_model, stop_ids=()), [p], 15, sampling=sampling)[0].ids for p in prompts]
    assert together == alone
    assert together[0] == together[3]
    named = [Prompt((5, 6, 7), "a"), Prompt((5, 6, 7), "b")]
    first, second = (each.ids for each in generate(engine, named, 15, sampling=sampling))
    assert first != second
    other = generate(engine, prompts, 15, sampling=Sampling(temperature=0.8, top_p=0.9, seed=12))
    assert [each.ids for each in other] != together


def test_a_tiny_temperature_is_greedy(tiny_model: Transformer) -> None:
    """With one row at a time: the order of rows depends on confidences, which temperature changes."""
    engine = engine_of(tiny_model, stop_ids=(), sub_block_size=1)
    cold = generate(engine, [(5, 6, 7)], 15, sampling=Sampling(temperature=1e-6, seed=1))[0].ids
    assert cold == generate(engine, [(5, 6, 7)], 15)[0].ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [(5, 61)], "max_new_tokens": 3}, "id 61"),
        ({"prompts": [(5, -1)], "max_new_tokens": 3}, "id -1"),
        ({"prompts": [(5,)], "max_new_tokens": 512}, "512 positions"),
        ({"prompts": [(5,)], "max_new_tokens": -1}, "negative"),
    ],
)
def test_wrong_requests_are_refused_before_decoding(tiny_model: Transformer, arguments: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(tiny_model).generate(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sub_block_size": 3}, "does not divide"),
        ({"sub_block_size": 0}, "does not divide"),
        ({"block_size": 0}, "block size 0 is not from 1"),
        ({"mask_id": 61}, "mask id 61"),
        ({"stop_ids": (99,)}, "stop id 99"),
    ],
)
def test_wrong_decoding_is_refused(tiny_model: Transformer, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(tiny_model, **options)


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(UsageError, match="outside"):
        Threshold(threshold)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fused kernel", "our kernel"])
@pytest.mark.parametrize("block_cache", [True, False])
def test_attending_samples_together_or_one_by_one_is_the_same(dtype: torch.dtype, block_cache: bool) -> None:
    """Eleven samples of all lengths in a batch of six, so that slots idle, are refilled and differ in state."""
    prompts = [tuple(range(3, 4 + (7 * place) % 23)) for place in range(11)]
    model = sharpened(random_model(tiny_config(), dtype=dtype, seed=5))
    alone = [oracle(model, prompt, 21, block_cache=block_cache, stop_ids=(9,)).ids for prompt in prompts]
    engine = engine_of(model, batch_size=6, block_cache=block_cache, stop_ids=(9,))
    assert [each.ids for each in generate(engine, prompts, 21)] == alone
