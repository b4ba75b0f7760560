"""The decode loop. It exists once; generation and scoring differ only in which token goes to a revealed row.

Read top-down: samples join the batch and are prefilled, every tick gives each sample its next step (a denoising step,
or the commit of a finished block), one forward runs all of them, and finished samples leave.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.decode.policy import Candidates, DecodePolicy
from stepsaver.engine.decoding import Decoding
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan, commit_plan, prefill_plan
from stepsaver.engine.reuse.rule import ReuseRule, plan_step
from stepsaver.engine.rows import row_index, row_list
from stepsaver.engine.sampling import NonFiniteLogits, Proposals, Sampling, propose, uniform
from stepsaver.engine.state import BlockState, Ending, Request, Sample, ending_of, new_block
from stepsaver.engine.trace import ForwardRecord, Trace, sample_step
from stepsaver.engine.view import StepView, step_view

PREFILL_ROWS = 2048  # of one forward; bounds its memory, longer prompts take several


class StepEvent(NamedTuple):
    """What one sample's step did, for those who watch."""

    sample: Sample
    plan: StepPlan
    tokens: NDArray[np.int64]  # of the block, before the step
    proposed: NDArray[np.int64]
    confidence: NDArray[np.float64]
    revealed: int


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


def decode(decoder: Decoder, requests: Iterable[Request], trace: Trace) -> Iterator[Sample]:
    """Decodes all requests, at most `slots` at a time, and yields each sample when it is finished."""
    waiting = deque(enumerate(requests))
    free = list(range(decoder.slots))[::-1]
    active: list[Sample] = []
    while waiting or active:
        joining = [_join(decoder, *waiting.popleft(), slot=free.pop()) for _ in range(min(len(free), len(waiting)))]
        _prefill(decoder, joining, trace, waiting=len(waiting))
        active += joining
        running = [sample for sample in active if not sample.is_finished]
        if running:
            _tick(decoder, running, trace, waiting=len(waiting))
        leaving = [sample for sample in active if sample.is_finished]
        active = [sample for sample in running if not sample.is_finished]
        for sample in leaving:
            free.append(sample.slot)
            trace.samples += 1
            trace.tokens_generated += len(sample.generated)
            yield sample


def _join(decoder: Decoder, index: int, request: Request, *, slot: int) -> Sample:
    """A sample with its slot. The prompt's whole blocks are context, the rest opens the first block."""
    whole = len(request.prompt) // decoder.decoding.block_size * decoder.decoding.block_size
    block = _new_block(decoder, whole, request.prompt[whole:])
    sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    return sample


def _new_block(decoder: Decoder, start: int, given: tuple[int, ...]) -> BlockState:
    return new_block(start, given, decoding=decoder.decoding, layers=decoder.model.config.layers)


def _open_block(decoder: Decoder, sample: Sample, first_token: int) -> None:
    """Starts the block behind the context with the token that the context's last row predicts."""
    sample.block = _new_block(decoder, len(sample.context), (first_token,))
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)


def _prefill(decoder: Decoder, samples: list[Sample], trace: Trace, *, waiting: int) -> None:
    """Writes the context of new samples into the prefix cache, several samples and chunks per forward."""
    size = decoder.decoding.block_size
    todo = deque((sample, 0) for sample in samples if not sample.is_finished and _needs_prefill(decoder, sample))
    while todo:
        started = perf_counter()
        steps: list[Step] = []
        members: list[Sample] = []
        room = max(PREFILL_ROWS // size, 1) * size
        while todo and room:
            sample, start = todo.popleft()
            stop = min(start + room, len(sample.context))
            steps.append(_context_step(decoder, sample, start, stop))
            members.append(sample)
            room -= stop - start
            if stop < len(sample.context):
                todo.appendleft((sample, stop))
        proposals, forward_seconds = _forward(decoder, members, steps)
        for sample, step, proposed in zip(members, steps, proposals, strict=True):
            if step.plan.reads:
                _open_block(decoder, sample, int(proposed.tokens[0]))
            _enter(decoder, sample, step, revealed=step.plan.reads.bit_count())
        _record(trace, members, started, forward_seconds, waiting)


def _needs_prefill(decoder: Decoder, sample: Sample) -> bool:
    """Without a prefix cache a prefill only serves to predict the first token of a block that opens with none."""
    return bool(sample.context) and (decoder.decoding.prefix_cache or _opens_empty(sample))


def _opens_empty(sample: Sample) -> bool:
    return len(sample.request.prompt) == len(sample.context)


def _context_step(decoder: Decoder, sample: Sample, start: int, stop: int) -> Step:
    reads_last = _opens_empty(sample) and stop == len(sample.context)
    plan = prefill_plan(stop - start, reads_last=reads_last, layers=decoder.model.config.layers)
    return Step(sample.slot, start, np.array(sample.context[start:stop]), decoder.decoding.block_size, plan)


def _tick(decoder: Decoder, samples: list[Sample], trace: Trace, *, waiting: int) -> None:
    """Gives every sample its next step: plans them, runs them in one forward, reveals rows and opens blocks."""
    started = perf_counter()
    views = [_view(decoder, sample.block) for sample in samples]
    steps = [_plan(decoder, sample, view) for sample, view in zip(samples, views, strict=True)]
    proposals, forward_seconds = _forward(decoder, samples, steps)
    for sample, view, step, proposed in zip(samples, views, steps, proposals, strict=True):
        _advance(decoder, sample, view, step, proposed)
    _record(trace, samples, started, forward_seconds, waiting)


def _view(decoder: Decoder, block: BlockState) -> StepView:
    decoding = decoder.decoding
    return step_view(
        block,
        layers=decoder.model.config.layers,
        sub_block_size=decoding.sub_block_size,
        block_cache=decoding.block_cache,
    )


def _plan(decoder: Decoder, sample: Sample, view: StepView) -> Step:
    block = sample.block
    if block.masked & ~block.sealed:
        plan = plan_step(view, decoder.rules)
    else:
        plan = commit_plan(block.size, layers=view.layers)
    return Step(sample.slot, block.start, block.tokens, block.size, plan)


def _forward(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> tuple[list[Proposals], float]:
    """Runs all plans that are not empty. Returns each sample's proposals for the rows it reads."""
    started = perf_counter()
    running = [step for step in steps if not step.plan.is_empty]
    reads = [step.plan.reads.bit_count() for step in steps]
    if not running:
        return [_NOTHING for _ in steps], 0.0
    if not decoder.decoding.prefix_cache:
        _recompute_context(decoder, samples, steps)
    memory = decoder.memory
    if running[0].plan.kind == "prefill":
        memory = memory._replace(deltas=None)
    logits, executed = run_step(decoder.model, memory, running)
    assert executed.attention == sum(step.plan.attention_run for step in running), "row-layers differ from the plan"
    assert executed.mlp == sum(step.plan.mlp_run for step in running), "row-layers differ from the plan"
    uniforms = [] if decoder.sampling.is_greedy else _uniforms(decoder, samples, steps)
    try:
        proposals = propose(
            logits, mask_id=decoder.decoding.mask_id, sampling=decoder.sampling, uniforms=uniforms
        )
    except NonFiniteLogits as error:
        raise _named(error, samples, steps, reads) from None
    ends = np.cumsum(reads)[:-1]
    split = zip(np.split(proposals.tokens, ends), np.split(proposals.confidence, ends), strict=True)
    return [Proposals(*each) for each in split], perf_counter() - started


_NOTHING = Proposals(np.empty(0, dtype=np.int64), np.empty(0))


def _recompute_context(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> None:
    """Without a prefix cache every forward runs the context again."""
    for sample, step in zip(samples, steps, strict=True):
        if step.plan.is_empty or step.plan.kind == "prefill" or not sample.context:
            continue
        whole = _context_step(decoder, sample, 0, len(sample.context))
        plan = prefill_plan(len(sample.context), reads_last=False, layers=decoder.model.config.layers)
        run_step(decoder.model, decoder.memory._replace(deltas=None), [whole._replace(plan=plan)])


def _uniforms(decoder: Decoder, samples: list[Sample], steps: list[Step]) -> list[float]:
    """One random number per row that is read, for the token behind it."""
    return [
        uniform(decoder.sampling.seed, sample.request.key, step.start + row + 1, sample.block.steps)
        for sample, step in zip(samples, steps, strict=True)
        for row in row_list(step.plan.reads)
    ]


def _named(
    error: NonFiniteLogits, samples: list[Sample], steps: list[Step], reads: list[int]
) -> NonFiniteLogits:
    place = int(np.searchsorted(np.cumsum(reads), error.row, side="right"))
    sample, step = samples[place], steps[place]
    return NonFiniteLogits(
        error.row,
        f"logits are not finite: sample {sample.index}, block at position {step.start}, "
        f"step {sample.block.steps} ({step.plan.kind})",
    )


def _advance(decoder: Decoder, sample: Sample, view: StepView, step: Step, proposed: Proposals) -> None:
    """Lets the policy reveal rows of the block, or moves on to the next block behind a commit."""
    block = sample.block
    if step.plan.kind == "commit":
        sample.context += block.tokens.tolist()
        _open_block(decoder, sample, int(proposed.tokens[0]))
        _enter(decoder, sample, step, revealed=1)
        return
    block.record_run(step.plan)
    predicted = row_index(step.plan.reads) + 1
    block.proposed[predicted] = proposed.tokens
    block.confidence[predicted] = proposed.confidence
    rows = row_list(view.candidates)
    candidates = Candidates(rows, tuple(block.confidence[list(rows)].tolist()))
    chosen = decoder.policy.choose(candidates, view)
    assert chosen, f"{decoder.policy} made no progress"
    before = block.tokens.copy() if decoder.on_step else None
    block.reveal(chosen, block.proposed[row_index(chosen)])
    block.steps += 1
    _enter(decoder, sample, step, revealed=chosen.bit_count())
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    if decoder.on_step and before is not None:
        decoder.on_step(StepEvent(sample, step.plan, before, block.proposed, block.confidence, chosen))
    if not sample.is_finished and not block.masked and decoder.finished and decoder.finished(sample.generated):
        sample.ending = Ending("stop", block.start + block.size)


def _enter(decoder: Decoder, sample: Sample, step: Step, *, revealed: int) -> None:
    """Writes down what this step executed for the sample."""
    recomputes = not decoder.decoding.prefix_cache and step.plan.kind != "prefill" and not step.plan.is_empty
    sample.steps.append(
        sample_step(
            sample.index,
            step.plan,
            context=step.start + len(step.tokens),
            revealed=revealed,
            recomputed_context=step.start if recomputes else 0,
        )
    )


def _record(trace: Trace, samples: list[Sample], started: float, forward_seconds: float, waiting: int) -> None:
    entries = tuple(sample.steps[-1] for sample in samples)
    trace.records.append(ForwardRecord(perf_counter() - started, forward_seconds, entries, waiting))
