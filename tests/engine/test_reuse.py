"""The truths about reuse, proved by decoding with every rule of the registry that they apply to."""

from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepsaver.engine import registry
from stepsaver.engine.batch import BatchContext, ScheduledStep, StepEvent, execute, view_of
from stepsaver.engine.decoders.denoise import Denoise
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import random_model
from stepsaver.engine.models.transformer import Layer, Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import Positions
from stepsaver.engine.rules.layer_reuse import LayerReuse
from stepsaver.engine.rules.rule import Rule, parse_rule, plan_step
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.state import BlockState, Request, Sample, new_block
from stepsaver.engine.trace import Trace
from tests.conftest import GOLDEN, sharpened, tiny_config
from tests.engine.golden_cases import read_golden
from tests.engine.rule_cases import ACTING, NEUTRAL, combined_rule_sets, rule_sets

ACTING_SETS = rule_sets(ACTING) + combined_rule_sets()
PROMPTS = [(5, 6, 7), tuple(range(10, 26)), (9,), tuple(range(20, 31))]


def commits_are_whole(rules: tuple[Rule, ...]) -> bool:
    return all(type(rule).narrow_commit is Rule.narrow_commit for rule in rules)


def named(rules: tuple[Rule, ...]) -> str:
    return "+".join(map(registry.describe, rules)) or "none"


def engine_of(model: Transformer, rules: tuple[Rule, ...] = (), **options: Any) -> Engine:
    policy = options.pop("policy", Threshold(options.pop("threshold", 0.5)))
    batch_size = options.pop("batch_size", 1)
    decoding = resolve_decoding(model.config, **({"sub_block_size": 4, "stop_ids": ()} | options))
    return Engine(model, decoder=Denoise(policy, rules), batch_size=batch_size, decoding=decoding, checked=True)


def generate(engine: Engine, prompts: list = PROMPTS, limit: int = 28, **options: Any) -> list[Completion]:
    return sorted(engine.generate(prompts, max_new_tokens=limit, **options), key=lambda each: each.index)


@pytest.fixture
def counted(tiny_model: Transformer) -> Iterator[Counter[str]]:
    """The positions that every layer's MLP really runs."""
    counts: Counter[str] = Counter()
    hooks = [
        layer.mlp.register_forward_hook(lambda module, given, _: counts.update(mlp=given[0].shape[0]))
        for layer in tiny_model.layers
    ]
    yield counts
    for hook in hooks:
        hook.remove()


def what_was_done(completion: Completion) -> tuple:
    """The text and the steps, whichever forwards of the batch they were in."""
    return completion.ids, [step._replace(forward=0) for step in completion.steps]


@pytest.mark.parametrize("rules", [(), *ACTING_SETS], ids=named)
def test_steps_are_the_same_checked_or_not_in_batches_and_in_single_precision(
    tiny_model: Transformer, counted: Counter[str], rules: tuple[Rule, ...]
) -> None:
    """What is noted for single layers is for the checks and for deltas alone: plans follow from the set of rows."""
    trace, checked = Trace(), engine_of(tiny_model, rules, join="off")
    expected = generate(checked, trace=trace)
    assert counted["mlp"] == sum(entry.mlp_run for entry in trace.entries)
    single = deepcopy(tiny_model).float().prepare()
    for model, batch_size in ((tiny_model, 2), (single, 3)):
        free = Engine(model, decoder=checked.decoder, batch_size=batch_size, decoding=checked.decoding)
        assert list(map(what_was_done, generate(free))) == list(map(what_was_done, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rules", ACTING_SETS, ids=named)
def test_a_model_of_one_layer_decodes_with_every_rule_that_does_not_refuse_it(
    rules: tuple[Rule, ...], dtype: torch.dtype
) -> None:
    """Its only layer is the last one too, in which fewer rows go on."""
    model = sharpened(random_model(tiny_config(layers=1), dtype=dtype, seed=5))
    refused = [rule for rule in rules if rule.name == "adaptive_layers" or getattr(rule, "layers", "") == "thirds:2"]
    if refused:
        with pytest.raises(UsageError, match=r"no layer of 1 to skip|a model of 1 layer has no thirds"):
            engine_of(model, rules, batch_size=2)
        return
    engine = engine_of(model, rules, batch_size=2)
    assert [len(each.ids) for each in generate(engine)] == [28] * len(PROMPTS)


def test_a_changed_row_that_is_not_noted_is_found(tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    unmask = BlockState.unmask

    def forgetful(block: BlockState, rows: Positions, tokens: NDArray[np.int64]) -> None:
        changed = block.changed
        unmask(block, rows, tokens)
        block.changed = changed

    monkeypatch.setattr(BlockState, "unmask", forgetful)
    with pytest.raises(AssertionError, match="is noted"):
        generate(engine_of(tiny_model))


@pytest.mark.parametrize("rules", rule_sets(NEUTRAL), ids=named)
def test_neutral_settings_are_bit_exact(tiny_model: Transformer, rules: tuple[Rule, ...]) -> None:
    """Truth 1: the same tokens, confidences and work as without rules."""
    seen: dict[bool, list] = {True: [], False: []}
    for with_rules in (True, False):

        def keep(event: StepEvent, into: list = seen[with_rules]) -> None:
            into.append((event.plan.window, event.plan.layers, event.unmasked, event.confidence.copy()))

        # a rule that keeps deltas joins no forwards, and the same bits need the same forwards
        engine = engine_of(tiny_model, rules if with_rules else (), batch_size=2, join="off")
        seen[with_rules].append([each.ids for each in generate(engine, on_step=keep)])
    assert seen[True][-1] == seen[False][-1]
    assert len(seen[True]) == len(seen[False])
    for ours, plain in zip(seen[True][:-1], seen[False][:-1], strict=True):
        assert ours[:3] == plain[:3]
        assert np.array_equal(ours[3], plain[3], equal_nan=True)


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("threshold", [0.3, 0.9])
def test_output_mode_is_a_literal_evaluation_whatever_the_group(
    tiny_model: Transformer, k: int, threshold: float
) -> None:
    """Layers outside the group really run, layers inside return their cached outputs; no forward gives the same."""
    engines = [
        engine_of(tiny_model, (LayerReuse(k=k, layers=group, mode="output"),), threshold=threshold)
        for group in ("first", "last", "0,2", "1")
    ]
    completion, *others = (generate(engine, [PROMPTS[0]], 24)[0] for engine in engines)
    assert all(other.ids == completion.ids for other in others)
    assert any(step.kind == "reused" and step.rows == 0 for step in completion.steps)
    for group in ({0, 2}, {1}):
        literal = literal_output_reuse(tiny_model, PROMPTS[0], 24, frozenset(group), k, threshold=threshold)
        assert completion.ids == literal


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("trim", ["structural", "changed"])
def test_output_mode_computes_a_step_whose_rows_nobody_proposed_a_token_for(
    tiny_model: Transformer, k: int, trim: str
) -> None:
    """With a window, the first step of a later sub-block is small too, and its rows may never have been read."""
    rules = [f"trim:level={trim}", "suffix_dropout", "partial_commit", f"layer_reuse:k={k},mode=output"]
    for window in ("window:refresh=block", "window:refresh=sub-block"):
        parsed = tuple(parse_rule(rule) for rule in (window, *rules))
        completions = generate(engine_of(tiny_model, parsed, threshold=0.5), limit=40)
        assert [len(each.ids) for each in completions] == [40] * len(PROMPTS)
        assert any(step.kind == "reused" for each in completions for step in each.steps)


def literal_output_reuse(
    model: Transformer, prompt: tuple[int, ...], limit: int, group: frozenset[int], k: int, *, threshold: float
) -> list[int]:
    """A plain decoder with the source's reuse: contiguous group or not, a layer of it returns what it last returned."""
    block, sub = 8, 4
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit:
        start = len(tokens) // block * block
        if start == len(tokens):
            logits, _ = _plain(model, tokens, None, frozenset())
            tokens.append(_best(logits[-1])[0])
            continue
        rows = tokens[start:] + [1] * (block - len(tokens) + start)
        masked = set(range(len(tokens) - start, block))
        index, caches = 0, {}
        while masked:
            first = min(masked) // sub * sub
            full = index == 0 or first in masked
            reuse = not full and index % k != 0
            context = tokens[:start]
            window = range(block) if full else range(first, first + sub)
            logits = _window_step(model, context, rows, window, caches, group if reuse else frozenset())
            found = {row: _best(logits[row - 1]) for row in range(first, first + sub) if row in masked}
            best = max(found, key=lambda row: found[row][1])
            for row, (token, sure) in found.items():
                if sure > threshold or row == best:
                    rows[row] = token
                    masked.discard(row)
            index += 1
        tokens = tokens[:start] + rows
    return tokens[len(prompt) : len(prompt) + limit]


def _best(logits: torch.Tensor) -> tuple[int, float]:
    probabilities = logits.softmax(-1)
    probabilities[1] = -1
    return int(probabilities.argmax()), float(probabilities.max())


def _attend(model: Transformer, layer: Layer, q, k, v, mask) -> torch.Tensor:
    group = model.config.heads // model.config.kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhe,khe->hqk", q, k) / model.config.head_dim**0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return layer.attention.finish(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(-2))


def _plain(model: Transformer, ids: list[int], cache, group) -> tuple[torch.Tensor, list]:
    """A block-causal forward; returns logits and keys and values per layer."""
    positions = torch.arange(len(ids)) // 8
    mask = positions[:, None] >= positions[None]
    rotation = model.rotations(len(ids)) if ids else None
    h, kept = model.embedding(torch.tensor(ids, dtype=torch.long)), []
    for layer in model.layers:
        if not ids:
            kept.append(None)
            continue
        q, k, v = layer.attention.project_rotated(h, rotation)
        kept.append((k, v))
        h = h + _attend(model, layer, q, k, v, mask)
        h = h + layer.mlp(h)
    return (model.logits(h) if ids else torch.empty(0)), kept


def _window_step(model: Transformer, context, rows, window, caches: dict, reused: frozenset[int]) -> dict:
    """One step over a window of the block. `caches`: keys, values and last outputs per row."""
    start = len(context)
    _, kept = _plain(model, context, None, frozenset())
    table = model.rotations(start + 8)
    index = torch.tensor([start + row for row in window])
    rotation = table[index]
    h = model.embedding(torch.tensor([rows[row] for row in window]))
    for number, layer in enumerate(model.layers):
        if number in reused:
            h = torch.stack([caches["output", number, row] for row in window])
            continue
        q, k, v = layer.attention.project_rotated(h, rotation)
        for place, row in enumerate(window):
            caches["kv", number, row] = (k[place], v[place])
        keys = torch.stack([caches["kv", number, row][0] for row in range(8)])
        values = torch.stack([caches["kv", number, row][1] for row in range(8)])
        if kept[number] is not None:
            keys, values = torch.cat((kept[number][0], keys)), torch.cat((kept[number][1], values))
        h = h + _attend(model, layer, q, keys, values, None)
        h = h + layer.mlp(h)
        for place, row in enumerate(window):
            caches["output", number, row] = h[place]
    return dict(zip(window, model.logits(h), strict=True))


@pytest.mark.parametrize("number", range(len(read_golden(GOLDEN)["output_reuse_cases"])))
def test_output_mode_equals_the_sources_last_version(golden_model: Transformer, number: int) -> None:
    case = read_golden(GOLDEN)["output_reuse_cases"][number]
    rule = LayerReuse(k=case["k"], layers="0-11", mode="output")
    engine = engine_of(
        golden_model,
        (rule,),
        threshold=case["threshold"],
        sub_block_size=case["small_block_size"],
        stop_ids=(case["stop_token"],),
        block_cache=case["block_cache"],
        batch_size=2,
    )
    for completion, prompt, output in zip(
        generate(engine, case["prompts"], 96), case["prompts"], case["outputs"], strict=True
    ):
        expected = output[len(prompt) :]
        if case["stop_token"] in expected:
            expected = expected[: expected.index(case["stop_token"]) + 1]
        shorter = min(len(expected), len(completion.ids))
        assert shorter
        assert completion.ids[:shorter] == expected[:shorter]


@pytest.mark.parametrize("kv", ["refresh", "freeze"])
def test_delta_reproduces_the_logits_if_nothing_changed(tiny_model: Transformer, kv: str) -> None:
    """Truth 3: a policy that unmasks nothing new cannot be had, so the second step is planned by hand."""
    rule = LayerReuse(k=3, layers="all", mode="delta", kv=kv)  # type: ignore[arg-type]
    engine = engine_of(tiny_model, (rule,))
    memory = engine._memory(1, 8)
    batch = BatchContext(tiny_model, memory, engine.decoder, engine.decoding, Sampling(), slots=1, checked=True)
    block = new_block(0, (5, 6, 7, 8, 9), decoding=engine.decoding, layers=3)
    sample = Sample(0, Request((5, 6, 7, 8, 9), 3, b""), 0, [], block)
    outcomes = []
    for _ in range(2):
        view = view_of(batch, block)
        step = Step(0, 0, block.tokens, 8, plan_step(view, (rule,)))
        outcomes.append((step.plan, execute(batch, [ScheduledStep(sample, block, step, view)]).proposals[0]))
        block.record_run(step.plan)
        block.steps += 1
    (first, computed), (second, reused) = outcomes
    assert first.mlp_reused == 0
    assert second.mlp_run == second.attention_run == 0
    kept = sum(rows.keys_values.bit_count() for rows in second.layers[:-1])  # the last layer keeps no unread deltas
    assert kept == (0 if kv == "freeze" else second.positions * 2)
    assert np.array_equal(computed.tokens, reused.tokens)
    assert np.allclose(computed.confidence, reused.confidence, atol=1e-12)


@pytest.mark.parametrize("rules", [each for each in ACTING_SETS if commits_are_whole(each)], ids=named)
def test_context_after_each_block_is_that_of_a_clean_forward(
    tiny_model: Transformer, rules: tuple[Rule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truth 5: compares the prefix cache at the end with a plain forward over the committed tokens."""
    kept = []
    original = Engine._memory

    def keep(self: Engine, slots: int, positions: int):  # type: ignore[no-untyped-def]
        kept.append(original(self, slots, positions))
        return kept[-1]

    monkeypatch.setattr(Engine, "_memory", keep)
    completion = generate(engine_of(tiny_model, rules), [PROMPTS[1]], 29)[0]
    committed = (len(PROMPTS[1]) + len(completion.ids)) // 8 * 8 - 8
    tokens = (list(PROMPTS[1]) + completion.ids)[:committed]
    _, clean = _plain(tiny_model, tokens, None, frozenset())
    assert committed >= 32
    for layer, (keys, values) in enumerate(clean):
        stored = kept[0].cache.read(layer, slice(0, 1), committed)
        assert torch.allclose(stored[0][0].transpose(0, 1), keys, atol=1e-5)
        assert torch.allclose(stored[1][0].transpose(0, 1), values, atol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rules=st.sampled_from(ACTING_SETS),
    order=st.permutations(range(4)),
    batch_size=st.integers(1, 4),
    limits=st.lists(st.integers(1, 24), min_size=4, max_size=4),
    threshold=st.sampled_from([0.2, 0.6, 1.0]),
)
def test_batch_mates_do_not_matter(
    tiny_model: Transformer, rules: tuple, order: list[int], batch_size: int, limits: list[int], threshold: float
) -> None:
    """Truth 6, in float64, with samples that finish and join."""
    prompts = [Prompt(PROMPTS[place], max_new_tokens=limits[place]) for place in order]
    together = generate(engine_of(tiny_model, rules, batch_size=batch_size, threshold=threshold), prompts)
    for prompt, completion in zip(prompts, together, strict=True):
        assert completion.ids == generate(engine_of(tiny_model, rules, threshold=threshold), [prompt])[0].ids


@pytest.mark.parametrize("rules", ACTING_SETS, ids=named)
def test_every_decode_ends_on_random_weights(rules: tuple[Rule, ...]) -> None:
    """Truth 8: progress on a model that knows nothing, at threshold 1."""
    model = sharpened(random_model(tiny_config(), dtype=torch.float64, seed=0), factor=3.0)
    assert len(generate(engine_of(model, rules, threshold=1.0), [(5, 6)], 40)[0].ids) == 40
