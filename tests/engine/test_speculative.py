"""Speculative decoding: the text of autoregressive decoding, whatever is drafted and with whom."""

import json
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.decoders.autoregressive import Autoregressive
from stepsaver.engine.decoders.budget import (
    RATE,
    START,
    WORTHLESS,
    Acceptance,
    Budget,
    Costs,
    allocate,
    best_budget,
    expected,
)
from stepsaver.engine.decoders.chosen import chosen_decoder, parse_decoder
from stepsaver.engine.decoders.speculative import Speculative, Tokens
from stepsaver.engine.decoding_settings import resolve_decoding
from stepsaver.engine.engine import Engine, Prompt
from stepsaver.engine.errors import UsageError
from stepsaver.engine.models.load import load_model, random_model
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.sampling import Sampling
from stepsaver.engine.score import ScoreRequest
from stepsaver.engine.trace import Trace
from stepsaver.evaluation.embedded import DATA_FOLDER, MODEL_FOLDER
from stepsaver.evaluation.encoding import encode_prompt
from stepsaver.evaluation.tokenizer import TextTokenizer
from tests.conftest import GOLDEN, SHARED, sharpened, tiny_config
from tests.engine.golden_cases import read_golden
from tests.engine.test_suffix_dropout import attended

BLOCK = 8
SDAR = {"architecture": "SDARForCausalLM", "predicts": "self", "head_norms": True, "qkv_bias": False}
FAMILIES = {"next": {}, "self": SDAR}
QUICK = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def family_model(family: str, seed: int = 5, **changes: Any) -> Transformer:
    return sharpened(
        random_model(tiny_config(**FAMILIES[family], **changes), dtype=torch.float64, seed=seed), factor=12.0
    )


def engine_of(
    model: Transformer, decoder: Speculative | Autoregressive | None = None, *, batch_size: int = 1, **options: Any
) -> Engine:
    decoding = resolve_decoding(model.config, **({"stop_ids": ()} | options))
    return Engine(model, decoder=decoder or Speculative(), batch_size=batch_size, decoding=decoding, checked=True)


def texts(engine: Engine, prompts: list, limit: int, **options: Any) -> list[list[int]]:
    completions = sorted(engine.generate(prompts, max_new_tokens=limit, **options), key=lambda each: each.index)
    return [each.ids for each in completions]


def autoregressive(model: Transformer, prompts: list, limit: int, **options: Any) -> list[list[int]]:
    own = {name: options.pop(name) for name in ("sampling", "finished") if name in options}
    return texts(engine_of(model, Autoregressive(), **options), prompts, limit, **own)


budgets = st.sampled_from(["auto", 0, 2, 3, 8, 20, 60])


@settings(max_examples=80, **QUICK)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=4),
    decoder=st.builds(Speculative, positions=budgets, span=st.integers(1, 9)),
    family=st.sampled_from(["next", "self"]),
    batch_size=st.integers(1, 4),
    stop=st.sampled_from([(), (7,), (3, 40)]),
    sampling=st.sampled_from([Sampling(), Sampling(0.7, seed=3), Sampling(1.3, 0.8)]),
    join=st.sampled_from(["on", "off"]),
    seed=st.integers(0, 3),
)
def test_the_text_is_that_of_autoregressive_decoding(
    lengths, decoder, family, batch_size, stop, sampling, join, seed
) -> None:
    """In float64, on models that know nothing, so that most drafts are wrong; ragged batches, stop tokens, limits."""
    model = family_model(family, seed)
    draw = np.random.default_rng(seed)
    prompts = [Prompt(tuple(draw.integers(3, 60, length).tolist()), max_new_tokens=limit) for length, limit in lengths]
    engine = engine_of(model, decoder, batch_size=batch_size, stop_ids=stop, join=join)
    found = texts(engine, prompts, 0, sampling=sampling)
    assert found == autoregressive(model, prompts, 0, stop_ids=stop, sampling=sampling)


@pytest.mark.parametrize(
    "folder",
    [
        GOLDEN,
        GOLDEN.parent / "golden_sdar",
        *(pytest.param(SHARED / "golden" / name, marks=pytest.mark.long) for name in ("tied-12", "untied-28")),
    ],
)
@pytest.mark.parametrize("text", ["speculative:positions=0", "speculative:positions=20", "speculative:positions=44"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.9)])
def test_golden_checkpoints_write_their_autoregressive_text(folder, text: str, sampling: Sampling) -> None:
    if not folder.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    model = load_model(folder, dtype=torch.float64)
    prompts = [
        prompt for case in read_golden(folder)["cases"][:2] for prompt in case.get("prompts") or [case["prompt"]]
    ][:4]
    decoder = parse_decoder(text)
    assert isinstance(decoder, Speculative)
    found = texts(engine_of(model, decoder, batch_size=3), prompts, 24, sampling=sampling)
    assert found == autoregressive(model, prompts, 24, batch_size=4, sampling=sampling)


@pytest.mark.long
@pytest.mark.parametrize("positions", [0, 20, 44])
def test_every_word_problem_has_its_autoregressive_text(positions: int) -> None:
    """All 1,319 in float64, where there are no near-ties."""
    model, tokenizer = load_model(MODEL_FOLDER, dtype=torch.float64), TextTokenizer(MODEL_FOLDER)
    lines = (DATA_FOLDER / "mini_gsm8k.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [Prompt(tuple(encode_prompt(tokenizer, json.loads(line)["question"], chat=True))) for line in lines]
    assert len(prompts) == 1319
    stop = resolve_decoding(model.config).stop_ids
    found = texts(engine_of(model, Speculative(positions), batch_size=64, stop_ids=stop), prompts, 256)
    assert found == autoregressive(model, prompts, 256, batch_size=64, stop_ids=stop)


@torch.inference_mode()
def literal_logits(model: Transformer, lines: list[tuple[int, int]], sees: list[set[int]]) -> torch.Tensor:
    """One forward without caches over (token, position), each of which sees what it is said to see."""
    tokens, positions = (torch.tensor(each) for each in zip(*lines, strict=True))
    mask = torch.tensor([[index in each for index in range(len(lines))] for each in sees])
    h, table = model.embedding(tokens), model.rotations(int(positions.max()) + 1)[positions]
    for layer in model.layers:
        q, k, v = layer.attention.project_rotated(h, table)
        h = h + layer.attention.finish(attended(q, k, v, model.config.heads // model.config.kv_heads, mask))
        h = h + layer.mlp(h)
    return model.logits(h)


def literal_best(model: Transformer, lines: list[tuple[int, int]], sees: list[set[int]]) -> list[int]:
    logits = literal_logits(model, lines, sees).clone()
    logits[:, model.config.mask_id] = -torch.inf
    return logits.argmax(-1).tolist()


def text_lines(text: list[int], block_size: int) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Causal text, but for its finished blocks, in which all see each other."""
    whole = len(text) // block_size * block_size
    ends = [(p // block_size + 1) * block_size if p < whole else p + 1 for p in range(len(text))]
    return [(token, position) for position, token in enumerate(text)], [{*range(end)} for end in ends]


def literal_round(
    model: Transformer, text: list[int], draft: list[int], branches: list[int], block_size: int
) -> tuple[list[int], list[list[int]]]:
    """What a round writes after each number of accepted tokens, and what its branches draft, by the book."""
    lines, sees = text_lines(text, block_size)
    known, mask = len(text), model.config.mask_id
    lines += [(token, known + index) for index, token in enumerate(draft)]
    sees += [{*range(known + index + 1)} for index in range(len(draft))]
    masked_copies, drafting = [], []
    for accepted, count in enumerate(branches):
        before = {*range(known + accepted)}
        first = len(lines)
        if model.config.predicts == "self":
            masked_copies.append(first)
            lines.append((mask, known + accepted))
            sees.append(before | {first})
        drafting.append([*range(len(lines), len(lines) + count)])
        for index in drafting[-1]:
            lines.append((mask, known + accepted + index - first))
            sees.append(before | {first} | {*drafting[-1]})
    best = literal_best(model, lines, sees)
    writing = masked_copies or [known - 1 + accepted for accepted in range(len(branches))]
    return [best[index] for index in writing], [[best[index] for index in each] for each in drafting]


class Watched(Speculative):
    """Checks every round against the literal evaluation."""

    rounds: list[int] = []  # noqa: RUF012 (of the class: decoders keep no state)

    def postprocess(self, batch, run, proposals):  # type: ignore[no-untyped-def]
        sample = run[0].sample
        ran, text = sample.round, [*sample.context, *sample.block.tokens[: sample.block.known].tolist()]
        if run[0].plan.kind == "verify":
            self.rounds.append(sum(ran.branches))
            size = batch.decoding.block_size if self.context == "block" else 1
            draft = ran.draft.ids.tolist()
            written, drafted = literal_round(batch.model, text, draft, ran.branches, size)
            made = proposals[0].tokens.tolist()
            if len(text) + len(draft) == sample.request.end:  # nobody needs what comes after the text
                written.pop()
                drafted.pop()
            if batch.decoding.prediction.opens_blocks:
                found = [*written, *chain(*drafted)]
            else:
                found = [*chain(*([one, *others] for one, others in zip(written, drafted, strict=True)))]
            assert made == found
        return super().postprocess(batch, run, proposals)


@settings(max_examples=25, **QUICK)
@given(
    prompt=st.lists(st.integers(3, 60), min_size=1, max_size=20),
    limit=st.integers(1, 26),
    positions=st.sampled_from([0, 5, 20, 60]),
    span=st.integers(1, 9),
    family=st.sampled_from(["next", "self"]),
    context=st.sampled_from(["causal", "block"]),
)
def test_rounds_equal_a_literal_evaluation_branch_by_branch(prompt, limit, positions, span, family, context) -> None:
    Watched.rounds.clear()
    texts(engine_of(family_model(family), Watched(positions, span, context)), [prompt], limit)
    assert bool(sum(Watched.rounds)) <= (positions > 0)
    assert len(Watched.rounds) >= 1


@torch.inference_mode()
def literal_text(model: Transformer, prompt: list[int], limit: int, block_size: int) -> list[int]:
    """One token at a time: causal inside the current block, finished blocks bidirectional."""
    text = list(prompt)
    while len(text) < len(prompt) + limit:
        lines, sees = text_lines(text, block_size)
        if model.config.predicts == "self":
            lines.append((model.config.mask_id, len(text)))
            sees.append({*range(len(text) + 1)})
        text.append(literal_best(model, lines, sees)[-1])
    return text[len(prompt) :]


@settings(max_examples=25, **QUICK)
@given(
    prompt=st.lists(st.integers(3, 60), min_size=1, max_size=20),
    limit=st.integers(1, 28),
    span=st.integers(1, 9),
    positions=budgets,
    family=st.sampled_from(["next", "self"]),
)
def test_a_context_of_blocks_equals_one_token_at_a_time(prompt, limit, span, positions, family) -> None:
    model = family_model(family)
    found = texts(engine_of(model, Speculative(positions, span, "block"), batch_size=2), [prompt, prompt[:3]], limit)
    assert found == [literal_text(model, each, limit, BLOCK) for each in (prompt, prompt[:3])]


@pytest.mark.parametrize("context", ["causal", "block"])
def test_a_sampled_text_does_not_depend_on_the_budget(context) -> None:
    model, sampling = family_model("next"), Sampling(1.0, seed=11)
    found = [
        texts(engine_of(model, Speculative(each, 6, context), batch_size=2), [(5, 6), (9,)], 30, sampling=sampling)
        for each in (0, 2, 20, "auto")
    ]
    assert found == [found[0]] * 4
    assert found[0] != texts(engine_of(model, Speculative(0, 6, context)), [(5, 6), (9,)], 30)


# faults


class BranchesSeeEachOther(Speculative):
    """A fault: a branch sees what lies between the text and itself."""

    def _round_step(self, *given):  # type: ignore[no-untyped-def]
        step = super()._round_step(*given)
        views = step.layout.views.copy()
        views[step.layout.branches > 0, 2] = views[step.layout.branches > 0, 1]
        return step._replace(layout=step.layout._replace(views=views))


class DraftSeesABranch(Speculative):
    """A fault: the last drafted token sees the place behind it, where a branch lies."""

    def _round_step(self, *given):  # type: ignore[no-untyped-def]
        step = super()._round_step(*given)
        views = step.layout.views.copy()
        views[np.flatnonzero(step.layout.branches < 0)[-1], 0] += 1
        return step._replace(layout=step.layout._replace(views=views))


class ABranchIsBelieved(Speculative):
    """A fault: the next draft's keys and values are read as if they had been verified."""

    def _accept(self, batch, turn, sample, made):  # type: ignore[no-untyped-def]
        outcome = super()._accept(batch, turn, sample, made)
        if not sample.is_finished and len(sample.draft.ids) > 1:
            self._write(batch, sample, sample.draft[:1])
            sample.final = sample.known
        return outcome


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (BranchesSeeEachOther, "which are not its own"),
        (DraftSeesABranch, "is not causal"),
        (ABranchIsBelieved, "of a draft, or of nothing"),
    ],
)
@pytest.mark.parametrize("family", ["next", "self"])
def test_faults_are_caught(fault: type[Speculative], message: str, family: str) -> None:
    with pytest.raises(AssertionError, match=message):
        texts(engine_of(family_model(family), fault(40, 6)), [tuple(range(5, 16))], 28)


class AlwaysWrong(Speculative):
    """Drafts that are never right: the worst that a model can do."""

    def _accept(self, batch, turn, sample, made):  # type: ignore[no-untyped-def]
        outcome = super()._accept(batch, turn, sample, made)
        sample.draft = Tokens((sample.draft.ids + 1) % 61, sample.draft.confidence)
        return outcome


def test_drafts_that_are_always_wrong_make_a_token_a_round_and_are_soon_short() -> None:
    model = family_model("next")
    (made,) = engine_of(model, AlwaysWrong(20, 8)).generate([(5, 6, 7)], max_new_tokens=40)
    assert [made.ids] == autoregressive(model, [(5, 6, 7)], 40)
    rounds = [step for step in made.steps if step.kind == "verify"]
    assert sum(step.unmasked == 1 for step in rounds) >= 0.9 * len(rounds)
    assert rounds[-1].drafted <= rounds[1].drafted


def test_single_precision_and_its_kernels_give_the_same_text(tiny_model: Transformer) -> None:
    from copy import deepcopy

    prompts = [(5, 6, 7), tuple(range(10, 26)), (9,), tuple(range(20, 31))]
    single = deepcopy(tiny_model).float().prepare()
    for context in ("causal", "block"):
        decoder = Speculative(20, 6, context)  # type: ignore[arg-type]
        assert texts(engine_of(single, decoder, batch_size=3), prompts, 30) == texts(
            engine_of(tiny_model, decoder), prompts, 30
        )


def pens(dtype: torch.dtype = torch.float32) -> tuple[Transformer, list[int]]:
    model, tokenizer = load_model(MODEL_FOLDER, dtype=dtype), TextTokenizer(MODEL_FOLDER)
    question = "Tom has 12 pens. Tom buys 9 more. Ann has 3 more pens than Tom. How many pens does Ann have?"
    return model, encode_prompt(tokenizer, question, chat=True)


def test_a_forward_has_no_more_positions_than_its_budget_and_more_positions_save_forwards() -> None:
    model, prompt = pens()
    forwards = []
    for positions in (2, 8, 20, 44):
        trace = Trace()
        engine = Engine(model, decoder=Speculative(positions), checked=True)
        (made,) = engine.generate([prompt], max_new_tokens=96, trace=trace)
        rounds = [step for step in made.steps if step.kind == "verify"]
        assert {step.kind for step in made.steps} == {"prefill", "verify"}
        assert max(step.rows for step in rounds) <= positions
        assert trace.forwards == len(rounds)  # the prompt's forward is the first round's
        assert sum(step.unmasked for step in rounds) == len(made.ids)
        forwards.append(len(rounds))
    assert sorted(forwards, reverse=True) == forwards
    assert forwards[-1] < 0.5 * forwards[0]


def test_no_position_runs_whose_prediction_nobody_needs() -> None:
    """What was drafted after a stop token is not verified, nor does the stop token itself predict what follows it."""
    model, prompt = pens()
    (made,) = Engine(model, decoder=Speculative(0), checked=True).generate([prompt], max_new_tokens=96)
    assert made.finish == "stop"
    drafts = [step for step in made.steps if step.kind == "draft"]
    assert all(step.rows == step.head_rows <= 16 for step in drafts)
    last = [step for step in made.steps if step.kind == "verify"][-1]
    assert last.unmasked == last.rows == last.drafted < 16


def test_events_tell_the_branches_and_which_was_taken() -> None:
    model, prompt = pens()
    events: list[StepEvent] = []
    (ids,) = texts(Engine(model, decoder=Speculative(20)), [prompt], 96, on_step=events.append)
    taken = [[each for each in event.branches if each.is_taken] for event in events]
    assert all(len(each) <= 1 for each in taken)
    for before, after in pairwise(range(len(events))):
        if taken[before]:
            branch, event = taken[before][0], events[after]
            count = len(event.tokens) - 2
            assert event.start == events[before].start + branch.accepted + 1
            assert event.tokens[1 : 1 + count].tolist() == list(branch.tokens[:count])
    written = [token for event in events for token in event.proposed[1 : 1 + event.unmasked.bit_count()].tolist()]
    assert written == ids


# the budget


def promises(chances: list[float], verified: int, masks: list[int]) -> list[float]:
    """What the positions of an allocation promise, by the book."""
    reached = np.cumprod([1.0, *chances[:verified]]).tolist()
    exactly = [a - b for a, b in pairwise(reached)] + [reached[-1]]
    return reached[1:] + [p * RATE**k for p, count in zip(exactly, masks, strict=True) for k in range(1, count + 1)]


@settings(max_examples=100, deadline=None)
@given(
    chances=st.lists(st.floats(0.01, 0.99), max_size=20),
    positions=st.integers(0, 60),
    costs=st.builds(Costs, st.integers(1, 2), st.integers(0, 1)),
    cap=st.integers(0, 16),
)
def test_an_allocation_is_what_promises_most(chances, positions, costs, cap) -> None:
    caps = [cap] * (len(chances) + 1)
    verified, masks = allocate(np.array(chances), positions, caps, costs)
    assert len(masks) == verified + 1 <= len(chances) + 1
    taken = (1 + verified) * costs.token + sum(masks) + costs.branch * sum(map(bool, masks))
    assert taken <= positions or (verified, sum(masks)) == (0, 0)
    assert max(masks) <= cap
    lowest = min(promises(chances, verified, masks), default=1.0)
    assert lowest >= WORTHLESS - 1e-9
    reached = np.cumprod([1.0, *chances]).tolist()
    exactly = [a - b for a, b in pairwise(reached[: verified + 1])] + [reached[verified]]
    for p, count in zip(exactly, masks, strict=True):  # what is left out promises no more than what is in
        assert count == cap or p * RATE ** (count + 1) <= lowest * (1 + 1e-9)


@pytest.mark.parametrize(
    ("chances", "positions", "found"),
    [
        ([], 5, (0, [5])),
        ([], 40, (0, [16])),
        ([0.99, 0.99], 4, (2, [0, 0, 2])),
        ([0.5, 0.5], 4, (1, [1, 1])),
        ([0.01], 8, (0, [8])),
        ([0.9] * 4, 0, (0, [0])),
    ],
)
def test_allocations(chances: list[float], positions: int, found: tuple[int, list[int]]) -> None:
    assert allocate(np.array(chances), 1 + positions, [16] * (len(chances) + 1), Costs()) == found


def test_acceptance_is_the_models_confidence_until_something_was_seen() -> None:
    seen = Acceptance()
    confidence = np.array([0.2, 0.6, 0.97])
    assert seen.chances(confidence).tolist() == confidence.tolist()
    assert seen.mean == pytest.approx(START)
    for _ in range(2):
        seen.note(np.array([0.97, 0.98, 0.6, 0.2]), 2)  # two right, the third wrong, the fourth not known
    assert seen.chances(confidence).tolist() == pytest.approx([0.2, 8 * 0.6 / 10, (4 + 8 * 0.97) / 12])
    assert seen.mean == pytest.approx((4 + 8 * START) / (6 + 8))


@pytest.mark.parametrize("budget", [Budget(12, 8), Budget(30, 16), Budget(0, 5)])
def test_what_a_budget_gives_is_what_rounds_of_it_give(budget: Budget) -> None:
    draw, chance, tokens, positions, forwards = np.random.default_rng(3), 0.7, 0, 0, 0
    for _ in range(1500):
        length = budget.span if not budget.positions else 0
        for _ in range(16 if budget.positions else 1):
            verified, masks = (
                allocate(np.full(length, chance), budget.positions, [budget.span] * (length + 1), Costs())
                if budget.positions
                else (length, [0] * (length + 1))
            )
            wrong = np.flatnonzero(draw.random(verified) >= chance)
            accepted = int(wrong[0]) if len(wrong) else verified
            tokens, forwards = tokens + accepted + 1, forwards + (1 if budget.positions else 2)
            positions += 1 + verified + sum(masks) + (0 if budget.positions else budget.span)
            length = masks[accepted]
    found = expected(chance, budget, Costs())
    assert found.tokens == pytest.approx(tokens / forwards, rel=0.03)
    assert sum(each * share for each, share in found.forwards) == pytest.approx(positions / forwards, rel=0.03)


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (lambda positions: 1.0, 60, 128),  # positions are free
        (lambda positions: max(1.0, positions / 64), 24, 64),  # up to 64
        (lambda positions: 1e-9 + positions, 0, 3),  # forwards are
    ],
)
def test_the_budget_that_pays(seconds: Callable[[float], float], least: int, most: int) -> None:
    found = best_budget(0.8, 16, Costs(), seconds)
    assert least <= found.positions <= most


def test_what_the_host_takes_for_branches_counts_against_them() -> None:
    """Where positions are free branches pay, unless planning them takes as long as a forward."""
    found = [best_budget(0.8, 16, Costs(), lambda positions: 1.0, planning).positions for planning in (0.0, 0.2, 4.0)]
    assert found[0] == found[1] >= 60
    assert found[2] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1, "sub_block_size": 1}, "blocks of one position is autoregressive"),
        ({"prefix_cache": False}, "they are off"),
        ({"block_cache": False}, "they are off"),
    ],
)
def test_what_makes_no_sense_is_one_line(tiny_model: Transformer, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        engine_of(tiny_model, **options)


def test_rules_policies_and_old_options_are_refused(tiny_model: Transformer) -> None:
    with pytest.raises(UsageError, match="rules belong to block diffusion, not to speculative:positions=auto"):
        chosen_decoder("speculative", rules="trim")
    with pytest.raises(UsageError, match="a policy belongs to block diffusion, not to autoregressive"):
        chosen_decoder("autoregressive", threshold=0.5)
    with pytest.raises(UsageError, match="policy 'verified:span=8' is a decoder now: --decode speculative:span=8"):
        chosen_decoder(policy="verified:span=8")
    with pytest.raises(UsageError, match="block has no fields"):
        parse_decoder("block:threshold=0.9")
    with pytest.raises(UsageError, match="context=block has no trajectory"):
        engine_of(tiny_model, Speculative(context="block")).score([ScoreRequest((5,), (6,))])
    for text, message in (
        ("span=0", "span 0 is not from 1 to 256"),
        ("positions=1", "positions 1 is neither 0 nor from 2 to 256"),
        ("positions=257", "positions 257 is neither"),
        ("span=auto", "span=auto is now positions=auto"),
        ("span=4,ahead=never", "ahead=never is now positions=0"),
        ("ahead=always", "ahead=always is now positions=auto"),
    ):
        with pytest.raises(UsageError, match=message):
            parse_decoder(f"speculative:{text}")


def test_a_trajectory_is_scored_as_the_text_is_written(tiny_model: Transformer) -> None:
    asked = [ScoreRequest((5, 6, 7), (8, 9)), ScoreRequest(tuple(range(5, 30)), (11,))]
    one, other = (list(engine_of(tiny_model).score(asked, estimator=each)) for each in ("trajectory", "autoregressive"))
    assert one == other


@settings(max_examples=15, **QUICK)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(3, 60), min_size=1, max_size=14), st.lists(st.integers(3, 60), max_size=9)),
        min_size=1,
        max_size=5,
    ),
    batch_size=st.integers(1, 3),
    family=st.sampled_from(["next", "self"]),
)
def test_the_autoregressive_estimator_scores_token_by_token(requests, batch_size: int, family: str) -> None:
    """Against one literal forward per token."""
    model = family_model(family)
    asked = [ScoreRequest(tuple(context), tuple(continuation)) for context, continuation in requests]
    found = engine_of(model, batch_size=batch_size).score(asked, estimator="autoregressive")
    for score in found:
        text, total, is_greedy = list(asked[score.index].context_ids), 0.0, True
        for token in asked[score.index].continuation_ids:
            lines, sees = text_lines(text, 1)
            if family == "self":
                lines.append((model.config.mask_id, len(text)))
                sees.append({*range(len(text) + 1)})
            total += float(literal_logits(model, lines, sees)[-1].log_softmax(-1)[token])
            is_greedy &= literal_best(model, lines, sees)[-1] == token
            text.append(token)
        assert score.loglikelihood == pytest.approx(total, abs=1e-9)
        assert score.is_greedy == is_greedy


def test_nothing_of_a_decode_is_left_for_the_next(tiny_model: Transformer) -> None:
    engine = engine_of(tiny_model)
    assert texts(engine, [(5, 6)], 4) == texts(engine, [(5, 6)], 4)
