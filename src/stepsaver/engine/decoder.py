"""What a batch is decoded with, and the execution of one forward: plans in, proposals out."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.decode.policy import DecodePolicy
from stepsaver.engine.decoding import Decoding
from stepsaver.engine.forward import Executed, Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan, prefill_plan
from stepsaver.engine.reuse.rule import ReuseRule
from stepsaver.engine.rows import Rows, row_list
from stepsaver.engine.sampling import NonFiniteLogits, Proposals, Sampling, propose, uniform
from stepsaver.engine.state import Sample
from stepsaver.engine.trace import LayersRun


class StepEvent(NamedTuple):
    """What one sample's step did, for those who watch."""

    sample: Sample
    plan: StepPlan
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
    on_step: Callable[[StepEvent], None] | None = None
    finished: Callable[[list[int]], bool] | None = None


class Executions(NamedTuple):
    """What a forward gave: each sample's proposals for the tokens behind the rows it reads."""

    proposals: list[Proposals]
    layers: LayersRun
    seconds: float


def execute(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> Executions:
    """Runs all plans that are not empty. Returns each sample's proposals for the rows it reads."""
    started = perf_counter()
    running = [step for step in steps if not step.plan.is_empty]
    reads = [step.plan.reads.bit_count() for step in steps]
    if not running:
        return Executions([_NOTHING] * len(steps), LayersRun(), 0.0)
    if not decoder.decoding.prefix_cache:
        _recompute_context(decoder, samples, steps)
    memory = decoder.memory
    if running[0].plan.kind == "prefill":
        memory = memory._replace(deltas=None)
    logits, executed = run_step(decoder.model, memory, running)
    _check_executed(executed, [step.plan for step in running])
    uniforms = [] if decoder.sampling.is_greedy else _uniforms(decoder, samples, steps)
    try:
        proposals = propose(logits, mask_id=decoder.decoding.mask_id, sampling=decoder.sampling, uniforms=uniforms)
    except NonFiniteLogits as error:
        raise _named(error, samples, steps, reads) from None
    ends = np.cumsum(reads)[:-1]
    split = zip(np.split(proposals.tokens, ends), np.split(proposals.confidence, ends), strict=True)
    layers = LayersRun(executed.attention_layers, executed.keys_values_layers, executed.mlp_layers)
    return Executions([Proposals(*each) for each in split], layers, perf_counter() - started)


_NOTHING = Proposals(np.empty(0, dtype=np.int64), np.empty(0))


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
