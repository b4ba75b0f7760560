"""Speculative decoding: the text of autoregressive decoding, whatever is drafted and with whom."""

import json
from itertools import accumulate
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.chosen import chosen_decoder, parse_decoder
from stepsaver.engine.decoders.speculative import Draft, Speculative, best_span
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Completion, Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Proposals, Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.embedded import DATA_FOLDER, MODEL_FOLDER
from stepsaver.evaluation.encoding import encode_prompt
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.conftest import GOLDEN, SHARED, sharpened, straight_curve, tiny_config
from tests.engine.golden_cases import read_golden
from tests.engine.test_hidden_rows import attended

BLOCK = 8


def engine_of(model: Transformer, policy: Speculative | None = None, *, batch_size: int = 1, **options) -> Engine:
    decoding = resolve_decoding(model.config, **({"stop_ids": ()} | options))
    return Engine(model, decoder=policy or Speculative(), batch_size=batch_size, decoding=decoding, checked=True)


def texts(engine: Engine, prompts: list, limit: int, **options) -> list[list[int]]:
    completions = sorted(engine.generate(prompts, max_new_tokens=limit, **options), key=lambda each: each.index)
    return [each.ids for each in completions]


def autoregressive(model: Transformer, prompts: list, limit: int, **options) -> list[list[int]]:
    return texts(Engine(model, decoding=decoding_of_one_row(model, **options)), prompts, limit)


def decoding_of_one_row(model: Transformer, **options):
    return resolve_decoding(model.config, **({"stop_ids": ()} | options | {"block_size": 1, "sub_block_size": 1}))


policies = st.builds(
    Speculative,
    span=st.integers(1, 9) | st.just("auto"),
    context=st.just("causal"),
    ahead=st.sampled_from(["auto", "always", "never"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=4),
    policy=policies,
    batch_size=st.integers(1, 4),
    stop=st.sampled_from([(), (7,), (3, 40)]),
    seed=st.integers(0, 3),
)
def test_the_text_is_that_of_blocks_of_one_row(
    lengths: list[tuple[int, int]], policy: Speculative, batch_size: int, stop: tuple[int, ...], seed: int
) -> None:
    """In float64, on models that know nothing, so that most drafts are wrong; ragged batches, stop tokens, limits."""
    model = sharpened(random_model(tiny_config(), dtype=torch.float64, seed=seed), factor=12.0)
    draw = np.random.default_rng(seed)
    prompts = [Prompt(tuple(draw.integers(3, 60, length).tolist()), max_new_tokens=limit) for length, limit in lengths]
    found = texts(engine_of(model, policy, batch_size=batch_size, stop_ids=stop), prompts, 0)
    assert found == autoregressive(model, prompts, 0, stop_ids=stop)


@pytest.mark.parametrize("folder", [GOLDEN, SHARED / "golden" / "tied-12", SHARED / "golden" / "untied-28"])
@pytest.mark.parametrize("policy", [Speculative(), Speculative(span=5, ahead="always"), Speculative(span="auto")])
def test_golden_checkpoints_write_their_autoregressive_text(folder, policy: Speculative) -> None:
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    model = load_model(folder, dtype=torch.float64)
    prompts = [prompt for case in read_golden(folder)["cases"][:6] for prompt in case["prompts"]]
    assert texts(engine_of(model, policy, batch_size=4), prompts, 40) == autoregressive(model, prompts, 40)


@pytest.mark.long
@pytest.mark.parametrize("policy", [Speculative(span=16), Speculative(span="auto")])
def test_every_word_problem_has_its_autoregressive_text(policy: Speculative) -> None:
    """All 1,319 in float64, where there are no near-ties."""
    model, tokenizer = load_model(MODEL_FOLDER, dtype=torch.float64), TextTokenizer(MODEL_FOLDER)
    lines = (DATA_FOLDER / "mini_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [Prompt(tuple(encode_prompt(tokenizer, json.loads(line)["question"], chat=True))) for line in lines]
    assert len(prompts) == 1319
    stop = resolve_decoding(model.config).stop_ids
    rows = Engine(model, decoding=decoding_of_one_row(model, stop_ids=stop), batch_size=64)
    found = texts(engine_of(model, policy, batch_size=64, stop_ids=stop), prompts, 256)
    assert found == texts(rows, prompts, 256)


@torch.inference_mode()
def literal_rows_in_blocks(model: Transformer, prompt: list[int], limit: int) -> list[int]:
    """One row at a time: causal inside the current block, finished blocks committed as block diffusion does."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        size = len(text)
        blocks = torch.arange(size) // BLOCK
        mask = blocks[:, None] >= blocks[None]
        unfinished = size // BLOCK * BLOCK
        mask[unfinished:] = torch.ones(size, size, dtype=torch.bool).tril()[unfinished:]
        h, table = model.embedding(torch.tensor(text)), model.rotations(size)
        for layer in model.layers:
            q, k, v = layer.attention.project_rotated(h, table)
            group = model.config.heads // model.config.kv_heads
            h = h + layer.attention.finish(attended(q, k, v, group, mask))
            h = h + layer.mlp(h)
        logits = model.logits(h[-1:])[0]
        logits[1] = -torch.inf
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(3, 60), min_size=1, max_size=20),
    limit=st.integers(1, 28),
    span=st.integers(1, 9) | st.just("auto"),
    ahead=st.sampled_from(["auto", "always", "never"]),
)
def test_a_context_of_blocks_equals_one_row_at_a_time(
    tiny_model: Transformer, prompt: list[int], limit: int, span, ahead
) -> None:
    policy = Speculative(span, "block", ahead)
    found = texts(engine_of(tiny_model, policy, batch_size=2), [prompt, prompt[:3]], limit)
    assert found == [literal_rows_in_blocks(tiny_model, each, limit) for each in (prompt, prompt[:3])]


class AlwaysWrong(Speculative):
    """Drafts that are never right: the worst that a model can do."""

    def take(self, batch, run, proposals):  # type: ignore[no-untyped-def]
        wrong = [
            Proposals((proposed.tokens + 1) % 61, *proposed[1:]) if turn.plan.kind == "draft" else proposed
            for turn, proposed in zip(run, proposals, strict=True)
        ]
        return super().take(batch, run, wrong)


@pytest.mark.parametrize("ahead", ["always", "never"])
def test_drafts_that_are_always_wrong_make_a_token_a_round(tiny_model: Transformer, ahead) -> None:
    expected = autoregressive(tiny_model, [(5, 6, 7)], 20)
    policy = Speculative(span=4, ahead=ahead)
    right = next(iter(engine_of(tiny_model, policy).generate([(5, 6, 7)], max_new_tokens=20)))
    wrong = next(iter(engine_of(tiny_model, AlwaysWrong(span=4, ahead=ahead)).generate([(5, 6, 7)], max_new_tokens=20)))
    assert wrong.ids == right.ids == expected[0]
    rounds = [step for step in wrong.steps if step.kind == "verify"]
    # a token plus one may by chance be the right one
    assert sum(step.revealed == 1 for step in rounds) >= 0.5 * len(rounds)
    assert len(rounds) > sum(step.kind == "verify" for step in right.steps)


class LeavesADraftBehind(Speculative):
    """A fault: what was drafted is believed, and its keys and values are read as if they had been verified."""

    def take(self, batch, run, proposals):  # type: ignore[no-untyped-def]
        outcomes = super().take(batch, run, proposals)
        draft = run[0].sample.draft
        if run[0].plan.kind == "draft" and len(draft.tokens) > 1:
            block = run[0].sample.block
            first = block.known
            block.confidence[first : first + 1] = 1.0
            block.reveal(1 << first, np.array(draft.tokens[:1]))
            draft.tokens = draft.tokens[1:]
        return outcomes


class KeepsWhatWasRefused(Speculative):
    """A fault: rows after the first refused token count as verified."""

    def _accept(self, batch, run, proposals):  # type: ignore[no-untyped-def]
        outcomes = super()._accept(batch, run, proposals)
        if run[0].sample.stamps is not None and outcomes[0].revealed < run[0].plan.rows:
            sample = run[0].sample
            block = sample.block
            if block.masked and not sample.is_finished:
                block.tokens[block.known - 1] = (block.tokens[block.known - 1] + 1) % 60 + 1
                sample.context[-1:] = [(sample.context[-1] + 1) % 60] if sample.context else []
        return outcomes


@pytest.mark.parametrize("fault", [LeavesADraftBehind, KeepsWhatWasRefused])
def test_what_a_draft_leaves_behind_is_caught(tiny_model: Transformer, fault: type[Speculative]) -> None:
    with pytest.raises(AssertionError, match=r"of a draft, or of nothing|another token than the text's"):
        texts(engine_of(tiny_model, fault(span=6, ahead="never")), [tuple(range(5, 16))], 28)


def test_single_precision_and_its_kernels_give_the_same_text(tiny_model: Transformer) -> None:
    from copy import deepcopy

    prompts = [(5, 6, 7), tuple(range(10, 26)), (9,), tuple(range(20, 31))]
    single = deepcopy(tiny_model).float().prepare()
    for context in ("causal", "block"):
        policy = Speculative(6, context)  # type: ignore[arg-type]
        assert texts(engine_of(single, policy, batch_size=3), prompts, 30) == texts(
            engine_of(tiny_model, policy), prompts, 30
        )


def test_the_trace_counts_what_was_run(tiny_model: Transformer) -> None:
    trace = Trace()
    engine = engine_of(tiny_model, Speculative(span=4, ahead="never"))
    (completion,) = engine.generate([(5, 6, 7)], max_new_tokens=20, trace=trace)
    kinds = [step.kind for step in completion.steps]
    assert kinds[:3] == ["draft", "prefill", "verify"]  # the prompt's first rows run beside the first draft
    assert set(kinds[3:]) == {"draft", "verify"}
    revealed = sum(step.revealed for step in completion.steps)
    assert 20 <= revealed <= 20 + 4
    assert all(step.rows <= 5 for step in completion.steps)


def test_a_verification_carries_the_next_draft() -> None:
    """Where a model is sure of itself, this halves the forwards; the text stays the same."""
    model, tokenizer = load_model(MODEL_FOLDER, dtype=torch.float32), TextTokenizer(MODEL_FOLDER)
    question = "Tom has 12 pens. Tom buys 9 more. Ann has 3 more pens than Tom. How many pens does Ann have?"
    prompt = tokenizer.encode(tokenizer.chat_prompt([{"role": "user", "content": question}]))
    found = {}
    for ahead in ("always", "never"):
        trace = Trace()
        engine = Engine(model, decoder=Speculative(ahead=ahead), checked=True)  # type: ignore[arg-type]
        found[ahead] = (texts(engine, [prompt], 96, trace=trace), trace.forwards)
    assert found["always"][0] == found["never"][0]
    assert found["always"][1] < found["never"][1]


@pytest.mark.parametrize("ahead", ["always", "never"])
def test_no_row_runs_whose_prediction_nobody_needs(ahead: Literal["always", "never"]) -> None:
    """A draft has a row per drafted token. What was drafted after a stop token is not verified, nor is the row of the
    stop token itself, which would predict what follows the text.
    """
    model, tokenizer = load_model(MODEL_FOLDER, dtype=torch.float32), TextTokenizer(MODEL_FOLDER)
    question = "Tom has 12 pens. Tom buys 9 more. How many pens does Tom have?"
    prompt = encode_prompt(tokenizer, question, chat=True)
    engine = Engine(model, decoder=Speculative(span=16, ahead=ahead), checked=True)
    (completion,) = engine.generate([prompt], max_new_tokens=96)
    assert completion.finish == "stop"
    drafts = [step for step in completion.steps if step.kind == "draft"]
    assert all(step.rows == step.head_rows <= 16 for step in drafts)
    last = [step for step in completion.steps if step.kind == "verify"][-1]
    assert last.revealed == last.rows < 16  # the stop token is the last that the causal rows predict


@pytest.mark.parametrize(
    ("acceptance", "forward_rows", "most", "span"),
    [(0.9, 16, 32, 12), (0.9, 3, 32, 5), (0.8, 40, 32, 10), (0.5, 1, 32, 1), (0.0, 5, 32, 1), (0.99, 16, 8, 8)],
)
def test_the_span_that_gives_most_tokens_for_the_cost(
    acceptance: float, forward_rows: float, most: int, span: int
) -> None:
    assert best_span(acceptance, forward_rows, most) == span
    tokens_per_row = [
        (1 - acceptance ** (each + 1)) / (1 - acceptance) / (2 * forward_rows + 2 * each + 1)
        for each in range(1, most + 1)
    ]
    assert tokens_per_row[span - 1] == max(tokens_per_row)


def test_acceptance_starts_high_and_follows_the_rounds(tiny_model: Transformer) -> None:
    assert [Draft(agreed=right, refused=wrong).acceptance for right, wrong in ((0, 0), (9, 0), (0, 10), (9, 2))] == [
        9 / 10,
        18 / 19,
        9 / 20,
        18 / 21,
    ]
    rounds: list[tuple[int, bool, int, int]] = []  # tokens confirmed, whether all were, and what is counted after it

    def watch(event: StepEvent) -> None:
        if event.plan.kind == "verify":
            draft = event.sample.draft  # type: ignore[attr-defined]
            right = event.revealed.bit_count() - 1  # and the token that the causal rows predict next
            rounds.append((right, right == event.plan.rows - 1, draft.agreed, draft.refused))

    texts(engine_of(tiny_model, Speculative(span=3, ahead="never")), [(5, 6, 7)], 30, on_step=watch)
    right, are_whole, agreed, refused = zip(*rounds, strict=True)
    assert list(agreed) == list(accumulate(right))
    assert list(refused) == list(accumulate(not whole for whole in are_whole))
    assert 0 < refused[-1] < len(rounds)


@pytest.mark.parametrize(
    ("span", "forward_rows", "carries"),
    [(8, 0.0, False), (8, 100.0, True), (2, 0.0, True), (16, 2.0, False), (16, 60.0, True)],
)
def test_the_next_draft_runs_ahead_where_a_saved_forward_is_worth_more_than_wasted_rows(
    span: int, forward_rows: float, carries: bool
) -> None:
    """At first nine of ten drafted tokens are expected to be right: of eight all with 0.43, of two with 0.81."""
    model = sharpened(random_model(tiny_config(block_size=32), dtype=torch.float64, seed=5))
    decoding = resolve_decoding(model.config, stop_ids=())
    engine = Engine(model, decoder=Speculative(span=span), decoding=decoding, curve=straight_curve(forward_rows))
    trace = Trace()
    list(engine.generate([(5, 6, 7)], max_new_tokens=29, trace=trace))
    first = next(record for record in trace.records if "verify" in [entry.kind for entry in record.entries])
    assert [entry.kind for entry in first.entries] == ["verify", "draft"][: 1 + carries]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1, "sub_block_size": 1}, "blocks of one row have none"),
        ({"prefix_cache": False}, "they are off"),
        ({"block_cache": False}, "they are off"),
    ],
)
def test_what_makes_no_sense_is_one_line(tiny_model: Transformer, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(tiny_model, **options)


def test_a_trajectory_is_scored_as_the_text_is_written(tiny_model: Transformer) -> None:
    asked = [ScoreRequest((5, 6, 7), (8, 9)), ScoreRequest(tuple(range(5, 30)), (11,))]
    one, other = (list(engine_of(tiny_model).score(asked, estimator=each)) for each in ("trajectory", "autoregressive"))
    assert one == other


def test_rules_temperature_and_trajectories_are_refused(tiny_model: Transformer) -> None:
    with pytest.raises(UsageError, match="rules belong to block diffusion, not to speculative:span=16"):
        chosen_decoder("speculative", rules="trim")
    with pytest.raises(UsageError, match="a policy belongs to block diffusion, not to autoregressive"):
        chosen_decoder("autoregressive", threshold=0.5)
    with pytest.raises(UsageError, match="policy 'verified:span=8' is a decoder now: --decode speculative:span=8"):
        chosen_decoder(policy="verified:span=8")
    with pytest.raises(UsageError, match="block has no fields"):
        parse_decoder("block:threshold=0.9")
    with pytest.raises(UsageError, match="speculative decoding is greedy"):
        engine_of(tiny_model).generate([(5,)], max_new_tokens=1, sampling=Sampling(temperature=1.0))
    with pytest.raises(UsageError, match="context=block has no trajectory"):
        engine_of(tiny_model, Speculative(context="block")).score([ScoreRequest((5,), (6,))])
    with pytest.raises(UsageError, match="span 0 is not positive"):
        Speculative(span=0)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(3, 60), min_size=1, max_size=14), st.lists(st.integers(3, 60), max_size=9)),
        min_size=1,
        max_size=5,
    ),
    batch_size=st.integers(1, 3),
)
def test_the_autoregressive_estimator_scores_row_by_row(tiny_model: Transformer, requests, batch_size: int) -> None:
    """Against blocks of one row, whose trajectory is the same text one token at a time."""
    asked = [ScoreRequest(tuple(context), tuple(continuation)) for context, continuation in requests]
    by_index = lambda score: score.index  # noqa: E731
    found = sorted(engine_of(tiny_model, batch_size=batch_size).score(asked, estimator="autoregressive"), key=by_index)
    rows = Engine(tiny_model, decoding=decoding_of_one_row(tiny_model))
    for one, other in zip(found, sorted(rows.score(asked), key=by_index), strict=True):
        assert one.loglikelihood == pytest.approx(other.loglikelihood, abs=1e-9)
        assert one.is_greedy == other.is_greedy


def completions(engine: Engine) -> list[Completion]:
    return list(engine.generate([(5, 6)], max_new_tokens=4))


def test_nothing_of_a_decode_is_left_for_the_next(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    assert [each.ids for each in completions(engine)] == [each.ids for each in completions(engine)]
