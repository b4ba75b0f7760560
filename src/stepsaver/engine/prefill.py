"""Writes the context of new samples into the prefix cache, several samples and chunks per forward."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from stepsaver.engine.batch import BatchContext, Outcome, ScheduledStep, StepGroup, next_steps
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import prefill_plan
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import Sample

PREFILL_ROWS = 2048  # positions of one forward, to bound its memory; longer prompts take several forwards


@dataclass
class Contexts:
    """The contexts of new samples that are still to run, and the samples that share each of them."""

    batch: BatchContext
    served: dict[int, list[Sample]]  # by the slot whose context is run; the slot's own sample comes first
    todo: deque[tuple[Sample, int]]  # each with the position where its context goes on
    next_slots: set[int] = field(default_factory=set)  # slots of the samples that wait for the next forward's contexts

    def next_forward(self) -> list[StepGroup]:
        """As many contexts as fit in a forward, and the first steps of their samples where prefills are joined."""
        contexts: list[StepGroup] = []
        steps: list[StepGroup] = []
        self.next_slots.clear()
        size = self.batch.decoding.block_size
        room = max(PREFILL_ROWS // size, 1) * size
        while self.todo and room:
            sample, start = self.todo.popleft()
            stop = min(start + room, len(sample.context))
            room -= stop - start
            self.next_slots.update(each.slot for each in self.served[sample.slot])
            step, wanted = _context_step(self.batch, sample, start, stop), _first_targets(self.served[sample.slot])
            scheduled = ScheduledStep(sample, sample.block, step, targets=wanted)
            contexts.append(self._group(scheduled, is_last=stop == len(sample.context)))
            if stop < len(sample.context):
                self.todo.appendleft((sample, stop))
            elif self._takes_step(scheduled):
                steps.append(next_steps(self.batch, sample))
        return contexts + steps

    def _group(self, scheduled: ScheduledStep, *, is_last: bool) -> StepGroup:
        samples = self.served[scheduled.sample.slot]

        def act(run: list[ScheduledStep], proposals: list[Proposals]) -> list[Outcome]:
            if is_last:
                _hand_on(self.batch, samples, proposals[0])
            return [Outcome(unmasked=len(proposals[0].tokens))]

        return StepGroup([scheduled], act)

    def _takes_step(self, scheduled: ScheduledStep) -> bool:
        """Whether a sample's first step runs with the end of its context: only if the step waits for nothing."""
        return self.batch.joins.prefill and not scheduled.plan.reads and len(self.served[scheduled.sample.slot]) == 1


def contexts_of(batch: BatchContext, samples: list[Sample]) -> Contexts:
    """The contexts that new samples need. Equal contexts are run once where they may be shared."""
    served = _share_contexts([sample for sample in samples if _needs_prefill(batch, sample)])
    return Contexts(batch, served, deque((samples[0], 0) for samples in served.values()))


def _share_contexts(samples: list[Sample]) -> dict[int, list[Sample]]:
    """For each slot that is prefilled, the samples that use its context, its own sample first."""
    shared: dict[int, list[Sample]] = {}
    leaders: dict[tuple[tuple[int, ...], bool], int] = {}
    for sample in samples:
        slot = sample.slot
        if sample.request.writer.shares_contexts:
            slot = leaders.setdefault((tuple(sample.context), _opens_empty(sample)), slot)
        shared.setdefault(slot, []).append(sample)
    return shared


def _hand_on(batch: BatchContext, samples: list[Sample], proposed: Proposals) -> None:
    """Copies the first sample's context to the others, and opens all their blocks if it predicts their first token."""
    leader, used = samples[0], 0
    position = len(leader.context)
    for sample in samples:
        if sample is not leader:
            batch.memory.cache.copy(leader.slot, sample.slot, position)
        if len(proposed.tokens):
            own = len(sample.request.writer.targets(position))
            scores = proposed.target_scores[0][used : used + own]
            batch.decoder.open(batch, sample, Proposals(proposed.tokens, proposed.confidence, [scores]))
            used += own


def _first_targets(samples: list[Sample]) -> tuple[int, ...]:
    """The tokens to score right after a shared context, sample by sample."""
    return tuple(token for each in samples for token in each.request.writer.targets(len(each.context)))


def _needs_prefill(batch: BatchContext, sample: Sample) -> bool:
    """Without a prefix cache, a prefill is only needed to predict the first token of a block that opens without one."""
    return (
        not sample.is_finished and bool(sample.context) and (batch.decoding.prefix_cache or _reads_last(batch, sample))
    )


def _reads_last(batch: BatchContext, sample: Sample) -> bool:
    return _opens_empty(sample) and batch.decoding.prediction.opens_blocks


def _opens_empty(sample: Sample) -> bool:
    return len(sample.request.prompt) == len(sample.context)


def _context_step(batch: BatchContext, sample: Sample, start: int, stop: int) -> Step:
    plan = prefill_plan(
        stop - start,
        reads_last=_reads_last(batch, sample) and stop == len(sample.context),
        layers=batch.model.config.layers,
        prediction=batch.decoding.prediction,
    )
    block_size = batch.decoder.context_block_size(batch.decoding)
    return Step(sample.slot, start, np.array(sample.context[start:stop]), block_size, plan)
