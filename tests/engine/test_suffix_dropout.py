"""Suffix dropout and partial commits: a shortened block beside a literal evaluation, and faults that break them."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepsaver.engine.batch import StepEvent
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.positions import position_list, positions_between
from stepsaver.engine.rules.partial_commit import PartialCommit
from stepsaver.engine.rules.rule import Rule, parse_rule
from stepsaver.engine.rules.suffix_dropout import SuffixDropout
from stepsaver.engine.trace import Trace
from stepsaver.engine.view import StepView
from tests.engine.test_reuse import engine_of, generate

BLOCK, SUB = 8, 4
BLOCK_CACHE_SETS = [("suffix_dropout",), ("window", "suffix_dropout"), ("suffix_dropout", "window", "trim")]


@torch.inference_mode()
def literal_logits(model: Transformer, context: list[int], block: list[int], end: int, stale: dict, rows: list[int]):
    """One step of a block that ends after `end` rows: runs `rows`, reads the others' keys and values from `stale`.

    The context is computed anew, block-causally. No cache, no plan, no packing.
    """
    start, group = len(context), model.config.heads // model.config.kv_heads
    table = model.rotations(start + BLOCK)
    blocks = torch.arange(start) // BLOCK
    h_context = model.embedding(torch.tensor(context, dtype=torch.long))
    h = model.embedding(torch.tensor([block[row] for row in rows]))
    for number, layer in enumerate(model.layers):
        q, k, v = layer.attention.project_rotated(h, table[[start + row for row in rows]])
        for index, row in enumerate(rows):
            stale[number, row] = (k[index], v[index])
        keys = torch.stack([stale[number, row][0] for row in range(end)])
        values = torch.stack([stale[number, row][1] for row in range(end)])
        if context:
            own, k_context, v_context = layer.attention.project_rotated(h_context, table[:start])
            keys, values = torch.cat((k_context, keys)), torch.cat((v_context, values))
            mixed = attended(own, k_context, v_context, group, blocks[:, None] >= blocks[None])
            h_context = h_context + layer.attention.finish(mixed)
            h_context = h_context + layer.mlp(h_context)
        h = h + layer.attention.finish(attended(q, keys, values, group, None))
        h = h + layer.mlp(h)
    return dict(zip(rows, model.logits(h), strict=True))


def attended(q, k, v, group: int, mask):
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhe,khe->hqk", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khe->qhe", scores.softmax(-1), v).flatten(-2)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(3, 60), min_size=1, max_size=20),
    names=st.sampled_from(BLOCK_CACHE_SETS),
    ahead=st.integers(0, 3),
    threshold=st.sampled_from([0.3, 0.7, 1.0]),
)
def test_every_step_is_that_of_the_shortened_block(
    tiny_model: Transformer, prompt: list[int], names: tuple[str, ...], ahead: int, threshold: float
) -> None:
    """Steps are taken as planned, their proposals compared with the literal evaluation of the rows that are there."""
    rules = tuple(SuffixDropout(ahead) if name == "suffix_dropout" else parse_rule(name) for name in names)
    kept: dict[int, dict] = {}
    steps = 0

    def compare(event: StepEvent) -> None:
        nonlocal steps
        block = event.sample.block
        if event.plan.is_empty:
            return
        end = BLOCK - event.plan.hidden.bit_count()
        assert end == min(event.sub_block.bit_length() + ahead, BLOCK)
        stale = kept.setdefault(block.start, {})
        context = list(event.sample.request.prompt) + event.sample.generated
        logits = literal_logits(
            tiny_model,
            context[: block.start],
            event.tokens.tolist(),
            end,
            stale,
            list(position_list(event.plan.window)),
        )
        for reader, row in zip(position_list(event.plan.reads), position_list(event.plan.predicted), strict=True):
            shares = logits[reader].softmax(-1)
            shares[1] = -1
            assert event.proposed[row] == int(shares.argmax())
            assert np.isclose(event.confidence[row], float(shares.max()), atol=1e-9)
            steps += 1

    generate(engine_of(tiny_model, rules, threshold=threshold), [tuple(prompt)], 18, on_step=compare)
    assert steps


def test_rows_after_the_sub_block_are_neither_computed_nor_attended(tiny_model: Transformer) -> None:
    trace = Trace()
    generate(engine_of(tiny_model, (SuffixDropout(),), threshold=1.0), [(5, 6)], 30, trace=trace)
    first_steps = [entry for entry in trace.entries if entry.kind == "full" and entry.step == 0]
    assert {(entry.rows, entry.context % BLOCK) for entry in first_steps} == {(SUB, SUB)}
    assert {entry.context % BLOCK for entry in trace.entries if entry.kind == "commit"} == {0}


@dataclass(frozen=True)
class LeavesOut(Rule):
    """A fault: rows after the sub-block are not computed, and attended to all the same."""

    name: ClassVar[str] = "leaves_out"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan.within(positions_between(0, view.sub_block.bit_length()))


@dataclass(frozen=True)
class HidesTheMiddle(LeavesOut):
    """A fault: hides rows that are not the last ones, where attention would read others in their stead."""

    name: ClassVar[str] = "hides_the_middle"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan.hiding(positions_between(SUB, SUB + 1)) if view.step == 0 and not plan.reads >> SUB & 1 else plan


@dataclass(frozen=True)
class CommitsTooLittle(LeavesOut):
    """A fault: a commit of the row that is read and no other."""

    name: ClassVar[str] = "commits_too_little"

    def narrow(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan

    def narrow_commit(self, plan: StepPlan, view: StepView) -> StepPlan:
        return plan.within(plan.reads)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (LeavesOut(), "stale keys of positions 4-7"),
        (HidesTheMiddle(), "are not the block's last ones"),
        (CommitsTooLittle(), "stale keys of positions"),
    ],
)
def test_planted_faults_are_caught(tiny_model: Transformer, fault: Rule, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        generate(engine_of(tiny_model, (fault,), threshold=1.0), [(5, 6)], 30)


@pytest.mark.parametrize("settle", [0, 1, 3])
def test_a_partial_commit_runs_what_changed_what_settles_and_what_is_read(tiny_model: Transformer, settle: int) -> None:
    trace, unmasked = Trace(), dict[int, list[int]]()
    engine = engine_of(tiny_model, (PartialCommit(settle),), threshold=0.6)
    watch = lambda event: unmasked.setdefault(event.sample.block.start, []).append(event.unmasked)  # noqa: E731
    generate(engine, [(5, 6)], 30, trace=trace, on_step=watch)
    expected = []
    for steps in unmasked.values():
        last = 1 << BLOCK - 1  # which predicts what opens the next block
        for rows in steps[-1 - settle :]:
            last |= rows
        expected.append(last.bit_count())
    commits = [entry.rows for entry in trace.entries if entry.kind == "commit"]
    assert len(commits) >= 3
    assert commits == expected[: len(commits)]
    assert min(commits) < BLOCK
