"""What a batch is decoded with, and the execution of one forward: plans in, proposals out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from stepsaver.engine.decode.policy import DecodePolicy
from stepsaver.engine.decoding import Decoding
from stepsaver.engine.forward import Executed, Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan, prefill_plan
from stepsaver.engine.reuse.rule import ReuseRule, plan_rest
from stepsaver.engine.rows import Rows, row_list
from stepsaver.engine.sampling import NonFiniteLogits, Proposals, Sampling, propose, uniform
from stepsaver.engine.state import BlockState, Sample
from stepsaver.engine.trace import LayersRun
from stepsaver.engine.view import StepView, step_view


class StepEvent(NamedTuple):
    """What one sample's step did, for those who watch."""

    sample: Sample
    plan: StepPlan
    sub_block: Rows
    changed: Rows  # before the step: rows whose token differs from the one they were last computed with
    tokens: NDArray[np.int64]  # of the block, before the step
    proposed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    revealed: Rows


@dataclass(frozen=True)
class Decoder:
    """Everything that stays the same while a batch is decoded."""

    model: Transformer
    memory: Memory
    decoding: Decoding
    policy: DecodePolicy
    rules: tuple[ReuseRule, ...]
    sampling: Sampling
    slots: int
    checked: bool = False  # prove before each step that nothing stale is read
    on_step: Callable[[StepEvent], None] | None = None
    finished: Callable[[list[int]], bool] | None = None


class Executions(NamedTuple):
    """What a forward gave: the steps as they were run, and proposals for the tokens behind the rows they read."""

    steps: list[Step]
    proposals: list[Proposals]
    layers: LayersRun
    seconds: float


def execute(
    decoder: Decoder, samples: list[Sample], steps: list[Step], options: list[tuple[int, ...]] | None = None
) -> Executions:
    """Runs all plans that are not empty. Returns each sample's proposals for the rows it reads.

    `options` are the tokens to be scored behind each row that is read; by default those of the samples themselves.
    """
    started = perf_counter()
    running = [place for place, step in enumerate(steps) if not step.plan.is_empty]
    if not running:
        return Executions(steps, [_NOTHING] * len(steps), LayersRun(), 0.0)
    if not decoder.decoding.prefix_cache:
        _recompute_context(decoder, samples, steps)
    memory = decoder.memory
    if steps[running[0]].plan.kind == "prefill":
        memory = memory._replace(deltas=None)
    blocks = [samples[place].block for place in running]
    output = run_step(decoder.model, memory, [steps[place] for place in running], partial(_plan_again, decoder, blocks))
    _check_executed(output.executed, [step.plan for step in output.steps])
    final = list(steps)
    for place, step in zip(running, output.steps, strict=True):
        final[place] = step
    if options is None:
        options = options_behind(samples, final)
    proposals = _propose(decoder, samples, final, output.logits, options)
    if output.drift is not None:
        _note_drift(blocks, output.steps, output.drift)
    executed = output.executed
    layers = LayersRun(executed.attention_layers, executed.keys_values_layers, executed.mlp_layers)
    return Executions(final, proposals, layers, perf_counter() - started)


def _propose(
    decoder: Decoder, samples: list[Sample], steps: list[Step], logits: Tensor, options: list[tuple[int, ...]]
) -> list[Proposals]:
    reads = [step.plan.reads.bit_count() for step in steps]
    uniforms = [] if decoder.sampling.is_greedy else _uniforms(decoder, samples, steps)
    try:
        proposals = propose(
            logits,
            mask_id=decoder.decoding.mask_id,
            sampling=decoder.sampling,
            uniforms=uniforms,
            options=options,
        )
    except NonFiniteLogits as error:
        raise _named(error, samples, steps, reads) from None
    ends = np.cumsum(reads)
    return [
        Proposals(
            proposals.tokens[end - count : end],
            proposals.confidence[end - count : end],
            proposals.option_scores[end - count : end],
        )
        for end, count in zip(ends, reads, strict=True)
    ]


def options_behind(samples: list[Sample], steps: list[Step]) -> list[tuple[int, ...]]:
    """The tokens to be scored behind each row that is read; an empty list if no sample is scored."""
    if all(sample.request.options is None for sample in samples):
        return []
    return [
        sample.request.options_at(step.start + row + 1)
        for sample, step in zip(samples, steps, strict=True)
        for row in row_list(step.plan.reads)
    ]


def _plan_again(decoder: Decoder, blocks: list[BlockState], steps: Sequence[Step], drift_N: Tensor) -> list[Step]:
    """In the middle of a forward: lets the rules that wanted to know the drift take away work of the layers behind."""
    planned: list[Step] = []
    for block, step, drift in zip(blocks, steps, _split_rows(steps, drift_N), strict=True):
        if step.plan.ask_after is None:
            planned.append(step)
            continue
        block.record_drift(step.plan, drift)
        planned.append(step._replace(plan=plan_rest(step.plan, view_of(decoder, block), decoder.rules)))
    return planned


def _note_drift(blocks: list[BlockState], steps: Sequence[Step], drift_N: Tensor) -> None:
    """Notes the drift of the samples whose rules were not asked in between, which has noted it already."""
    for block, step, drift in zip(blocks, steps, _split_rows(steps, drift_N), strict=True):
        if step.plan.ask_after is None and step.plan.kind != "commit":
            block.record_drift(step.plan, drift)


def _split_rows(steps: Sequence[Step], values_N: Tensor) -> list[NDArray[np.float64]]:
    ends = np.cumsum([step.plan.rows for step in steps])[:-1]
    return np.split(values_N.double().cpu().numpy(), ends)


def view_of(decoder: Decoder, block: BlockState) -> StepView:
    decoding = decoder.decoding
    return step_view(
        block,
        layers=decoder.model.config.layers,
        sub_block_size=decoding.sub_block_size,
        block_cache=decoding.block_cache,
    )


_NOTHING = Proposals(np.empty(0, dtype=np.int64), np.empty(0), [])


def _recompute_context(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> None:
    """Without a prefix cache every forward runs the context again."""
    for sample, step in zip(samples, steps, strict=True):
        if step.plan.is_empty or step.plan.kind == "prefill" or not sample.context:
            continue
        plan = prefill_plan(len(sample.context), reads_last=False, layers=decoder.model.config.layers)
        context = Step(sample.slot, 0, np.array(sample.context), decoder.decoding.block_size, plan)
        run_step(decoder.model, decoder.memory._replace(deltas=None), [context])


def _check_executed(executed: Executed, plans: list[StepPlan]) -> None:
    """What the parts counted is what the plans said: a rule that claims reuse and skips nothing fails here."""
    planned = (
        sum(plan.attention_run for plan in plans),
        sum(plan.keys_values_run for plan in plans),
        sum(plan.mlp_run for plan in plans),
        sum(plan.reads.bit_count() for plan in plans),
    )
    counted = (executed.attention, executed.keys_values, executed.mlp, executed.head)
    assert counted == planned, f"row-layers executed {counted} differ from the plan's {planned}"


def _uniforms(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> list[float]:
    """One random number per row that is read, for the token behind it."""
    return [
        uniform(decoder.sampling.seed, sample.request.key, step.start + row + 1, sample.block.steps)
        for sample, step in zip(samples, steps, strict=True)
        for row in row_list(step.plan.reads)
    ]


def _named(error: NonFiniteLogits, samples: list[Sample], steps: list[Step], reads: list[int]) -> NonFiniteLogits:
    place = int(np.searchsorted(np.cumsum(reads), error.row, side="right"))
    sample, step = samples[place], steps[place]
    return NonFiniteLogits(
        error.row,
        f"logits are not finite: sample {sample.index}, block at position {step.start}, "
        f"step {sample.block.steps} ({step.plan.kind})",
    )
