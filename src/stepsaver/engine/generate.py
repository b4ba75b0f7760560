"""The decode loop: schedule, run, postprocess. There is one, for generation and scoring (`score.py`) and all decoders.

An iteration takes waiting requests into free slots and schedules the next step of every sample: in block diffusion a
denoising step, or the commit of a finished block (`decoders/denoise.py`). All steps run in one forward. Then every
sample acts on what was proposed for it, and finished samples leave.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from time import perf_counter

from stepsaver.engine.batch import BatchContext, Execution, Outcome, ScheduledStep, StepGroup, execute, next_steps
from stepsaver.engine.curve import SECONDS as WORTH_MEASURING
from stepsaver.engine.curve import curve_of
from stepsaver.engine.prefill import Contexts, contexts_of
from stepsaver.engine.state import Request, Sample
from stepsaver.engine.trace import ForwardRecord, SampleStep, Trace, sample_step


def decode(batch: BatchContext, requests: Iterable[Request], trace: Trace) -> Iterator[Sample]:
    """Decodes all requests, at most `slots` at a time, and yields each sample when it is finished."""
    for samples in iterations(batch, requests, trace):
        yield from (sample for sample in samples if sample.is_finished)


def iterations(batch: BatchContext, requests: Iterable[Request], trace: Trace) -> Iterator[list[Sample]]:
    """Decodes all requests, and yields the samples of the batch after every iteration, finished ones included."""
    waiting, slots = deque(enumerate(requests)), list(range(batch.slots))[::-1]
    samples: list[Sample] = []
    begun = perf_counter()
    while waiting or samples:
        if batch.curve is None and batch.decoder.needs_curve and perf_counter() - begun > WORTH_MEASURING:
            batch = replace(batch, curve=curve_of(batch.model, batch.decoding, batch.slots), remembered={})
        new = [batch.decoder.join(batch, *waiting.popleft(), slots.pop()) for _ in range(min(len(slots), len(waiting)))]
        samples += new
        started = perf_counter()
        for groups in schedule(batch, samples, contexts_of(batch, new)):
            execution = execute(batch, [step for group in groups for step in group.steps])
            outcomes = postprocess(groups, execution)
            _record(batch, trace, execution, outcomes, started=started, waiting=len(waiting))
            started = perf_counter()
        finished = [sample for sample in samples if sample.is_finished]
        slots += [sample.slot for sample in finished]
        trace.samples += len(finished)
        trace.tokens_generated += sum(len(sample.generated) for sample in finished)
        yield samples
        samples = [sample for sample in samples if not sample.is_finished]


def schedule(batch: BatchContext, samples: list[Sample], contexts: Contexts) -> Iterator[list[StepGroup]]:
    """The forwards of an iteration: the contexts of new samples, then the next step of every sample. Where prefills are
    joined, the last contexts share a forward with the steps of samples that wait for no context.
    """
    while contexts.todo:
        groups = contexts.next_forward()
        if contexts.todo or not batch.joins.prefill:
            yield groups
        else:
            others = [each for each in samples if not each.is_finished and each.slot not in contexts.next_slots]
            yield groups + [next_steps(batch, each) for each in others]
            return
    groups = [next_steps(batch, each) for each in samples if not each.is_finished]
    if groups:
        yield groups


def postprocess(groups: list[StepGroup], execution: Execution) -> list[Outcome]:
    """Every sample acts on the proposals for its steps: writes tokens, commits its block, ends. One outcome a step."""
    outcomes: list[Outcome] = []
    for group in groups:
        own = slice(len(outcomes), len(outcomes) + len(group.steps))
        outcomes += group.act(execution.steps[own], execution.proposals[own])
    return outcomes


def _record(
    batch: BatchContext, trace: Trace, execution: Execution, outcomes: list[Outcome], *, started: float, waiting: int
) -> None:
    """Records what a forward executed, in the trace and in each sample, and calls `on_step`."""
    entries = tuple(
        _entry(batch, *each, forward=len(trace.records)) for each in zip(execution.steps, outcomes, strict=True)
    )
    for step, entry in zip(execution.steps, entries, strict=True):
        step.sample.steps.append(entry)
    trace.add(ForwardRecord(perf_counter() - started, execution.seconds, execution.layers, entries, waiting))
    trace.guesses_right += sum(outcome.guess == "right" for outcome in outcomes)
    trace.guesses_wrong += sum(outcome.guess == "wrong" for outcome in outcomes)
    for outcome in outcomes:  # after the record, so that the time of `on_step` is not counted
        if batch.on_step and outcome.event:
            batch.on_step(outcome.event)


def _entry(batch: BatchContext, scheduled: ScheduledStep, outcome: Outcome, *, forward: int) -> SampleStep:
    step, view = scheduled.step, scheduled.view
    recomputes = not batch.decoding.prefix_cache and step.plan.kind != "prefill" and not step.plan.is_empty
    return sample_step(
        scheduled.sample.index,
        step.plan,
        step=view.step if view else 0,
        step_in_sub_block=view.steps_in_sub_block if view else 0,
        context=step.seen,
        unmasked=outcome.unmasked,
        recomputed_context=step.start if recomputes else 0,
        drafted=outcome.drafted,
        forward=forward,
    )
