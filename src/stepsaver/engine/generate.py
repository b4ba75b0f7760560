"""The decode loop. There is one, for generation and for scoring (`score.py`), and for all decoders.

Read top-down: samples join the batch and are prefilled. Every tick gives each sample its next step (in block diffusion
a denoising step, or the commit of a finished block: `decoders/denoise.py`). One forward runs all steps, and finished
samples leave.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from time import perf_counter

from stepsaver.engine.batch import BatchContext, Execution, Outcome, Share, Turn, execute, step_share
from stepsaver.engine.prefill import Contexts, contexts_of
from stepsaver.engine.state import Request, Sample
from stepsaver.engine.trace import ForwardRecord, SampleStep, Trace, sample_step


def decode(batch: BatchContext, requests: Iterable[Request], trace: Trace) -> Iterator[Sample]:
    """Decodes all requests, at most `slots` at a time, and yields each sample when it is finished."""
    for samples in ticks(batch, requests, trace):
        yield from (sample for sample in samples if sample.is_finished)


def ticks(batch: BatchContext, requests: Iterable[Request], trace: Trace) -> Iterator[list[Sample]]:
    """Decodes all requests and yields the samples of the batch after every tick, also those that just finished."""
    waiting = deque(enumerate(requests))
    free = list(range(batch.slots))[::-1]
    active: list[Sample] = []
    while waiting or active:
        entering = range(min(len(free), len(waiting)))
        joining = [batch.decoder.join(batch, *waiting.popleft(), free.pop()) for _ in entering]
        active += joining
        started = perf_counter()
        for shares in _forwards(batch, active, contexts_of(batch, [each for each in joining if not each.is_finished])):
            _run(batch, shares, trace, started=started, waiting=len(waiting))
            started = perf_counter()
        for sample in active:
            if sample.is_finished:
                free.append(sample.slot)
                trace.samples += 1
                trace.tokens_generated += len(sample.generated)
        yield active
        active = [sample for sample in active if not sample.is_finished]


def _forwards(batch: BatchContext, samples: list[Sample], contexts: Contexts) -> Iterator[list[Share]]:
    """The forwards of a tick: the contexts of new samples, then the next step of every sample. Where prefills are
    joined, the last contexts share a forward with the steps of samples that wait for no context.
    """
    while contexts.todo:
        shares = contexts.next_forward()
        if batch.joins.prefill and not contexts.todo:
            others = [each for each in samples if not each.is_finished and each.slot not in contexts.next_slots]
            yield shares + [step_share(batch, each) for each in others]
            return
        yield shares
    running = [each for each in samples if not each.is_finished]
    if running:
        yield [step_share(batch, each) for each in running]


def _run(batch: BatchContext, shares: list[Share], trace: Trace, *, started: float, waiting: int) -> None:
    """Runs all shares in one forward, and lets each share act on its proposals."""
    execution = execute(batch, [turn for share in shares for turn in share.turns])
    outcomes: list[Outcome] = []
    for share in shares:
        mine = slice(len(outcomes), len(outcomes) + len(share.turns))
        outcomes += share.take(execution.turns[mine], execution.proposals[mine])
    _record(batch, trace, execution, outcomes, started=started, waiting=waiting)


def _record(
    batch: BatchContext, trace: Trace, execution: Execution, outcomes: list[Outcome], *, started: float, waiting: int
) -> None:
    """Records what a forward executed, in the trace and in each sample, and calls `on_step`."""
    entries = tuple(_entry(batch, *each) for each in zip(execution.turns, outcomes, strict=True))
    for turn, entry in zip(execution.turns, entries, strict=True):
        turn.sample.steps.append(entry)
    trace.add(ForwardRecord(perf_counter() - started, execution.seconds, execution.layers, entries, waiting))
    trace.guesses_right += sum(outcome.guess == "right" for outcome in outcomes)
    trace.guesses_wrong += sum(outcome.guess == "wrong" for outcome in outcomes)
    for outcome in outcomes:  # after the record, so that the time of `on_step` is not counted
        if batch.on_step and outcome.event:
            batch.on_step(outcome.event)


def _entry(batch: BatchContext, turn: Turn, outcome: Outcome) -> SampleStep:
    step, view = turn.step, turn.view
    recomputes = not batch.decoding.prefix_cache and step.plan.kind != "prefill" and not step.plan.is_empty
    return sample_step(
        turn.sample.index,
        step.plan,
        step=view.step if view else 0,
        step_in_sub_block=view.steps_in_sub_block if view else 0,
        context=step.seen,
        revealed=outcome.revealed,
        recomputed_context=step.start if recomputes else 0,
    )
