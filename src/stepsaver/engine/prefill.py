"""The context of new samples is written into the prefix cache, several samples and chunks per forward."""

from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

import numpy as np

from stepsaver.engine.base_plan import prefill_plan
from stepsaver.engine.batch import BatchContext, Execution, Outcome, Turn, execute, targets_of
from stepsaver.engine.denoise import open_block
from stepsaver.engine.packing import Step
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import Sample

PREFILL_ROWS = 2048  # of one forward; bounds its memory, longer prompts take several


class PrefillForward(NamedTuple):
    started: float
    execution: Execution
    outcomes: list[Outcome]


def prefill(batch: BatchContext, samples: list[Sample]) -> Iterator[PrefillForward]:
    """Runs the contexts of new samples and opens their blocks; where that is wanted, with their first steps."""
    shared = _share_contexts([sample for sample in samples if _needs_prefill(batch, sample)])
    size = batch.decoding.block_size
    todo = deque((followers[0], 0) for followers in shared.values())
    while todo:
        started = perf_counter()
        turns: list[Turn] = []
        room = max(PREFILL_ROWS // size, 1) * size
        while todo and room:
            sample, start = todo.popleft()
            stop = min(start + room, len(sample.context))
            turns.append(Turn(sample, sample.block, _context_step(batch, sample, start, stop)))
            room -= stop - start
            if stop < len(sample.context):
                todo.appendleft((sample, stop))
        contexts = len(turns)
        targets = [_first_targets(shared[turn.sample.slot]) for turn in turns if turn.plan.reads]
        joined = [batch.moves.turns(batch, turn.sample) for turn in turns if _joins(batch, turn, shared)]
        turns += [each for steps in joined for each in steps]
        execution = execute(batch, turns, targets + targets_of(turns[contexts:]))
        outcomes = [Outcome(revealed=len(proposed.tokens)) for proposed in execution.proposals[:contexts]]
        for turn, proposed in zip(turns[:contexts], execution.proposals, strict=False):
            if turn.step.start + len(turn.step.tokens) == len(turn.sample.context):
                _hand_on(batch, shared[turn.sample.slot], proposed)
        for steps in joined:
            mine = slice(len(outcomes), len(outcomes) + len(steps))
            outcomes += batch.moves.take(batch, execution.turns[mine], execution.proposals[mine])
        yield PrefillForward(started, execution, outcomes)


def _joins(batch: BatchContext, turn: Turn, shared: dict[int, list[Sample]]) -> bool:
    """Whether a sample takes its first step beside the end of its context: nothing of it may still be unknown."""
    return (
        batch.joins.prefill
        and turn.step.start + len(turn.step.tokens) == len(turn.sample.context)
        and not turn.plan.reads
        and len(shared[turn.sample.slot]) == 1
    )


def _share_contexts(samples: list[Sample]) -> dict[int, list[Sample]]:
    """Per slot that is prefilled, the samples that its context serves, its own first."""
    shared: dict[int, list[Sample]] = {}
    leaders: dict[tuple[tuple[int, ...], bool], int] = {}
    for sample in samples:
        slot = sample.slot
        if sample.request.writer.shares_contexts:
            slot = leaders.setdefault((tuple(sample.context), _opens_empty(sample)), slot)
        shared.setdefault(slot, []).append(sample)
    return shared


def _hand_on(batch: BatchContext, samples: list[Sample], proposed: Proposals) -> None:
    """Gives the first sample's context to the others, and opens their blocks if it predicts their first token."""
    leader, used = samples[0], 0
    position = len(leader.context)
    for sample in samples:
        if sample is not leader:
            batch.memory.cache.copy(leader.slot, sample.slot, position)
        if len(proposed.tokens):
            own = len(sample.request.writer.targets(position))
            scores = proposed.target_scores[0][used : used + own]
            open_block(batch, sample, Proposals(proposed.tokens, proposed.confidence, [scores]))
            used += own


def _first_targets(samples: list[Sample]) -> tuple[int, ...]:
    """The tokens that samples with the same context want scored right after it, sample by sample."""
    return tuple(token for each in samples for token in each.request.writer.targets(len(each.context)))


def _needs_prefill(batch: BatchContext, sample: Sample) -> bool:
    """Without a prefix cache a prefill only serves to predict the first token of a block that opens with none."""
    return bool(sample.context) and (batch.decoding.prefix_cache or _reads_last(batch, sample))


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
    block_size = batch.moves.context_block_size or batch.decoding.block_size
    return Step(sample.slot, start, np.array(sample.context[start:stop]), block_size, plan)
