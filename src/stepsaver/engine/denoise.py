"""The moves of block diffusion: denoising steps until no row of the block is masked, then a commit."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stepsaver.engine.base_plan import opening_readers
from stepsaver.engine.batch import BatchContext, Outcome, StepEvent, Turn, view_of
from stepsaver.engine.checks import assert_current
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan
from stepsaver.engine.policies.policy import Candidates, RevealPolicy
from stepsaver.engine.rows import row_index, row_list
from stepsaver.engine.rules.rule import plan_commit, plan_step
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Ending, Request, Sample, ending_of, new_block
from stepsaver.engine.view import StepView


def join_in_blocks(batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
    """A sample with its slot. The prompt's whole blocks are context; the rest opens the first block."""
    whole = len(request.prompt) // batch.decoding.block_size * batch.decoding.block_size
    block = _new_block(batch, request, whole, request.prompt[whole:])
    sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
    sample.ending = ending_of(sample, batch.decoding.stop_ids)
    return sample


def open_block(batch: BatchContext, sample: Sample, proposed: Proposals) -> None:
    """Starts the block after the context, with the token that the context predicts, if it predicts one."""
    start = len(sample.context)
    begin_block(batch, sample, tuple(sample.request.writer.write(start, *each) for each in proposed.each()))


def begin_block(batch: BatchContext, sample: Sample, given: tuple[int, ...]) -> None:
    sample.block = _new_block(batch, sample.request, len(sample.context), given)
    sample.ending = ending_of(sample, batch.decoding.stop_ids)


def _new_block(batch: BatchContext, request: Request, start: int, given: tuple[int, ...]) -> BlockState:
    layers = batch.model.config.layers if batch.keeps_layer_history else None
    return new_block(start, given, decoding=batch.decoding, layers=layers, last=request.writer.last)


@dataclass(frozen=True)
class Denoising:
    """The policy chooses which rows a step reveals. The rules choose what it computes.

    Where commits are joined, a commit's forward also runs the next block's first step. The first token of that block is
    guessed: it is what the last step read from the last row. The commit then tells whether the guess was right; if not,
    the step is run again. Either way the tokens are the same as with separate forwards.
    """

    policy: RevealPolicy
    context_block_size: ClassVar[int | None] = None

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        return join_in_blocks(batch, index, request, slot)

    def turns(self, batch: BatchContext, sample: Sample) -> list[Turn]:
        """A denoising step, or, if no row is left to reveal, the commit, maybe with the next block's first step."""
        block = sample.block
        if block.masked & ~block.sealed:
            return [self._denoise(batch, sample, block)]
        view = view_of(batch, block)
        turns = [_turn(batch, sample, block, view, plan_commit(view, batch.rules))]
        if batch.joins.commits:
            following = self._guessed_block(batch, sample)
            turns += [] if following is None else [self._denoise(batch, sample, following)]
        return turns

    def _denoise(self, batch: BatchContext, sample: Sample, block: BlockState) -> Turn:
        view = view_of(batch, block)
        plan = plan_step(view, batch.rules)
        if batch.joins.commits and view.candidates == block.masked and not plan.is_empty:
            plan = plan.also_reading(opening_readers(block.size, view.prediction))
        return _turn(batch, sample, block, view, plan)

    def _guessed_block(self, batch: BatchContext, sample: Sample) -> BlockState | None:
        """The block after the one being committed, if the guess is right; None without a guess or rows to reveal."""
        block, writer = sample.block, sample.request.writer
        start = block.start + block.size
        given: tuple[int, ...] = ()
        if batch.decoding.prediction.opens_blocks:
            wanted = writer.targets(start)[:1] or (() if block.opening is None else (block.opening,))
            if not wanted or wanted[0] in batch.decoding.stop_ids:
                return None
            given = wanted
        following = _new_block(batch, sample.request, start, given)
        is_needed = start + len(given) < sample.request.end and following.masked & ~following.sealed
        return following if is_needed else None

    def take(self, batch: BatchContext, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
        """Reveals rows after a denoising step; after a commit, goes on with the next block."""
        if run[0].plan.kind != "commit":
            return [self._reveal(batch, run[0], proposals[0])]
        outcomes = [commit(batch, run[0], proposals[0])]
        for turn, proposed in zip(run[1:], proposals[1:], strict=True):
            outcomes.append(self._follow(batch, turn, proposed))
        return outcomes

    def _follow(self, batch: BatchContext, turn: Turn, proposed: Proposals) -> Outcome:
        """Goes on with the guessed block if it equals the block that the commit opened."""
        sample = turn.sample
        if sample.is_finished or not np.array_equal(sample.block.tokens, turn.block.tokens):
            return Outcome(0, guess="wrong")
        sample.block = turn.block
        return self._reveal(batch, turn, proposed)._replace(guess="right")

    def _reveal(self, batch: BatchContext, turn: Turn, proposed: Proposals) -> Outcome:
        """Lets the policy choose among new and earlier proposals, and puts tokens into the chosen rows."""
        sample, block, view = turn.sample, turn.block, turn.view
        assert view is not None
        before = (view.changed, block.tokens.copy(), block.masked) if batch.on_step else None
        block.record_run(turn.plan)
        block.note(turn.plan.predicted, proposed)
        rows = row_list(view.candidates)
        confidences = tuple(block.confidence[row_index(view.candidates)].tolist())
        chosen, steps = self.policy.choose(Candidates(rows, confidences), view)
        assert chosen, f"{self.policy} made no progress"
        write = sample.request.writer.write
        block.reveal(chosen, np.array([write(block.start + row, *block.noted(row)) for row in row_list(chosen)]))
        block.count_steps(steps, is_last_of_sub_block=chosen == view.candidates)
        sample.ending = ending_of(sample, batch.decoding.stop_ids)
        if not sample.is_finished and not block.masked and batch.finished and batch.finished(sample.generated):
            sample.ending = Ending("stop", block.start + block.size)
        event = None
        if before is not None:
            made = (block.proposed, block.confidence, chosen)
            event = StepEvent(sample, turn.plan, block.start, view.sub_block, *before, *made)
        return Outcome(chosen.bit_count(), event)


def _turn(batch: BatchContext, sample: Sample, block: BlockState, view: StepView, plan: StepPlan) -> Turn:
    if batch.checked:
        assert_current(plan, view)
    return Turn(sample, block, Step(sample.slot, block.start, block.tokens, block.size, plan), view)


def commit(batch: BatchContext, turn: Turn, proposed: Proposals) -> Outcome:
    """Makes a committed block part of the context, and opens the next one."""
    sample = turn.sample
    sample.context += turn.block.tokens.tolist()
    open_block(batch, sample, proposed)
    return Outcome(revealed=len(proposed.tokens))
