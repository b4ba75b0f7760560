"""The decode loop. It exists once; generation and scoring differ only in which token goes to a revealed row.

Read top-down: samples join the batch and are prefilled, every tick gives each sample its next step (a denoising step,
or the commit of a finished block), one forward runs all of them, and finished samples leave.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.checks import assert_current
from stepsaver.engine.decode.policy import Candidates
from stepsaver.engine.decoder import Decoder, Executions, StepEvent, execute, view_of
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import commit_plan, prefill_plan
from stepsaver.engine.reuse.rule import plan_step
from stepsaver.engine.rows import Rows, row_index, row_list, rows_between
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Ending, OptionScores, Request, Sample, ending_of, new_block
from stepsaver.engine.trace import ForwardRecord, Trace, sample_step
from stepsaver.engine.view import StepView

PREFILL_ROWS = 2048  # of one forward; bounds its memory, longer prompts take several


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
    block = _new_block(decoder, request, whole, request.prompt[whole:])
    sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    return sample


def _new_block(decoder: Decoder, request: Request, start: int, given: tuple[int, ...]) -> BlockState:
    block = new_block(start, given, decoding=decoder.decoding, layers=decoder.model.config.layers)
    if request.options is not None:  # rows behind a continuation that is scored stay masked
        block.sealed = block.masked & ~rows_between(0, max(0, request.end - start))
    return block


def _open_block(decoder: Decoder, sample: Sample, proposed: Proposals) -> None:
    """Starts the block behind the context with the token that the context's last row predicts."""
    start, token = len(sample.context), int(proposed.tokens[0])
    options = sample.request.options_at(start)
    if options:
        sample.scores[start] = OptionScores(proposed.option_scores[0], token)
        token = options[0]
    sample.block = _new_block(decoder, sample.request, start, (token,))
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)


def _prefill(decoder: Decoder, samples: list[Sample], trace: Trace, *, waiting: int) -> None:
    """Writes the context of new samples into the prefix cache, several samples and chunks per forward."""
    size = decoder.decoding.block_size
    pending = [sample for sample in samples if not sample.is_finished and _needs_prefill(decoder, sample)]
    shared = _share_contexts(pending)
    todo = deque((sample, 0) for sample in pending if sample.slot in shared)
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
        served = [shared[sample.slot] for sample, step in zip(members, steps, strict=True) if step.plan.reads]
        executions = execute(decoder, members, steps, [_first_options(samples) for samples in served])
        for sample, step, proposed in zip(members, steps, executions.proposals, strict=True):
            _enter(decoder, sample, step, revealed=step.plan.reads.bit_count())
            if step.start + len(step.tokens) == len(sample.context):
                _hand_on(decoder, sample, shared[sample.slot], proposed)
        _record(trace, members, executions, started=started, waiting=waiting)


def _share_contexts(samples: list[Sample]) -> dict[int, list[Sample]]:
    """Per slot that is prefilled, the samples that its context serves: requests that are scored share an equal one."""
    shared: dict[int, list[Sample]] = {}
    leaders: dict[tuple[tuple[int, ...], bool], int] = {}
    for sample in samples:
        slot = sample.slot
        if sample.request.options is not None:
            slot = leaders.setdefault((tuple(sample.context), _opens_empty(sample)), slot)
        shared.setdefault(slot, []).append(sample)
    return shared


def _hand_on(decoder: Decoder, leader: Sample, samples: list[Sample], proposed: Proposals) -> None:
    """Gives a finished prefill to the samples that share it, and opens their blocks if it predicts the first token."""
    position, used = len(leader.context), 0
    for sample in samples:
        if sample is not leader:
            decoder.memory.cache.copy(leader.slot, sample.slot, position)
        if len(proposed.tokens):
            own = len(sample.request.options_at(position))
            scores = proposed.option_scores[0][used : used + own]
            _open_block(decoder, sample, Proposals(proposed.tokens, proposed.confidence, [scores]))
            used += own


def _first_options(samples: list[Sample]) -> tuple[int, ...]:
    """The tokens that samples with the same context want scored right behind it, one sample behind the other."""
    return tuple(token for each in samples for token in each.request.options_at(len(each.context)))


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
    views = [view_of(decoder, sample.block) for sample in samples]
    steps = [_plan(decoder, sample, view) for sample, view in zip(samples, views, strict=True)]
    executions = execute(decoder, samples, steps)
    events: list[StepEvent | None] = []
    for sample, view, step, proposed in zip(samples, views, executions.steps, executions.proposals, strict=True):
        if step.plan.kind == "commit":
            _move_on(decoder, sample, step, proposed)
        else:
            events.append(_reveal(decoder, sample, view, step, proposed))
    _record(trace, samples, executions, started=started, waiting=waiting)
    for event in events:  # behind the record: the time of those who watch is not the decode's
        if decoder.on_step and event:
            decoder.on_step(event)


def _plan(decoder: Decoder, sample: Sample, view: StepView) -> Step:
    block = sample.block
    if block.masked & ~block.sealed:
        plan = plan_step(view, decoder.rules)
        if decoder.checked:
            assert_current(plan, view)
    else:
        plan = commit_plan(block.size, layers=view.layers)
    return Step(sample.slot, block.start, block.tokens, block.size, plan)


def _move_on(decoder: Decoder, sample: Sample, step: Step, proposed: Proposals) -> None:
    """Behind a commit the block is context, and its last row predicts the first token of the next one."""
    _enter(decoder, sample, step, revealed=1)
    sample.context += sample.block.tokens.tolist()
    _open_block(decoder, sample, proposed)


def _reveal(decoder: Decoder, sample: Sample, view: StepView, step: Step, proposed: Proposals) -> StepEvent | None:
    """Lets the policy choose among the proposals, fresh or standing, and puts tokens into the chosen rows.

    Returns what happened if somebody watches.
    """
    block = sample.block
    before = (view.changed, block.tokens.copy()) if decoder.on_step else None
    block.record_run(step.plan)
    predicted = row_index(step.plan.reads) + 1
    block.proposed[predicted] = proposed.tokens
    block.confidence[predicted] = proposed.confidence
    if sample.request.options is not None:
        block.option_scores.update(zip(predicted.tolist(), proposed.option_scores, strict=True))
    rows = row_list(view.candidates)
    candidates = Candidates(rows, tuple(block.confidence[list(rows)].tolist()))
    chosen, steps = decoder.policy.choose(candidates, view)
    assert chosen, f"{decoder.policy} made no progress"
    block.reveal(chosen, _tokens_for(sample, chosen))
    _enter(decoder, sample, step, revealed=chosen.bit_count())
    block.count_steps(steps, is_last_of_sub_block=chosen == view.candidates)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    if not sample.is_finished and not block.masked and decoder.finished and decoder.finished(sample.generated):
        sample.ending = Ending("stop", block.start + block.size)
    if before is None:
        return None
    return StepEvent(sample, step.plan, view.sub_block, *before, block.proposed, block.confidence, chosen)


def _tokens_for(sample: Sample, rows: Rows) -> NDArray[np.int64]:
    """What goes into revealed rows: the proposals, or the given tokens of a request that is scored."""
    block, index = sample.block, row_index(rows)
    if sample.request.options is None:
        return block.proposed[index]
    for row in index.tolist():
        sample.scores[block.start + row] = OptionScores(block.option_scores[row], int(block.proposed[row]))
    return np.array([sample.request.options_at(block.start + row)[0] for row in index.tolist()])


def _enter(decoder: Decoder, sample: Sample, step: Step, *, revealed: int) -> None:
    """Writes down what this step executed for the sample."""
    recomputes = not decoder.decoding.prefix_cache and step.plan.kind != "prefill" and not step.plan.is_empty
    sample.steps.append(
        sample_step(
            sample.index,
            step.plan,
            step=sample.block.steps,
            step_in_sub_block=sample.block.steps_in_sub_block,
            context=step.start + len(step.tokens),
            revealed=revealed,
            recomputed_context=step.start if recomputes else 0,
        )
    )


def _record(trace: Trace, samples: list[Sample], executions: Executions, *, started: float, waiting: int) -> None:
    entries = tuple(sample.steps[-1] for sample in samples)
    seconds = perf_counter() - started
    trace.add(ForwardRecord(seconds, executions.seconds, executions.layers, entries, waiting))
