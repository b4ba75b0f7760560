"""The moves of block diffusion: denoising steps until no row of the block is masked, then a commit."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stepsaver.engine.checks import assert_current
from stepsaver.engine.decode.policy import Candidates, DecodePolicy
from stepsaver.engine.decoder import Decoder, Outcome, StepEvent, Turn, view_of
from stepsaver.engine.packing import Step
from stepsaver.engine.reuse.rule import plan_commit, plan_step
from stepsaver.engine.rows import row_list
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Ending, Request, Sample, ending_of, new_block


def join_in_blocks(decoder: Decoder, index: int, request: Request, slot: int) -> Sample:
    """A sample with its slot. The prompt's whole blocks are context, the rest opens the first block."""
    whole = len(request.prompt) // decoder.decoding.block_size * decoder.decoding.block_size
    block = _new_block(decoder, request, whole, request.prompt[whole:])
    sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    return sample


def open_block(decoder: Decoder, sample: Sample, proposed: Proposals) -> None:
    """Starts the block after the context: with the token that the context predicts, if it predicts one."""
    start = len(sample.context)
    begin_block(decoder, sample, tuple(sample.request.writer.write(start, *each) for each in proposed.each()))


def begin_block(decoder: Decoder, sample: Sample, given: tuple[int, ...]) -> None:
    sample.block = _new_block(decoder, sample.request, len(sample.context), given)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)


def _new_block(decoder: Decoder, request: Request, start: int, given: tuple[int, ...]) -> BlockState:
    return new_block(
        start, given, decoding=decoder.decoding, layers=decoder.model.config.layers, last=request.writer.last
    )


@dataclass(frozen=True)
class Denoising:
    """Which rows a step reveals is the policy's choice; what it computes, the rules'."""

    policy: DecodePolicy
    context_block_size: ClassVar[int | None] = None

    def join(self, decoder: Decoder, index: int, request: Request, slot: int) -> Sample:
        return join_in_blocks(decoder, index, request, slot)

    def open_block(self, decoder: Decoder, sample: Sample, proposed: Proposals) -> None:
        open_block(decoder, sample, proposed)

    def turns(self, decoder: Decoder, sample: Sample) -> list[Turn]:
        """The sample's next step: a denoising step, or the commit of a block without rows to reveal."""
        block, view = sample.block, view_of(decoder, sample.block)
        plan = plan_step(view, decoder.rules) if block.masked & ~block.sealed else plan_commit(view, decoder.rules)
        if decoder.checked:
            assert_current(plan, view)
        return [Turn(sample, block, Step(sample.slot, block.start, block.tokens, block.size, plan), view)]

    def take(self, decoder: Decoder, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
        """Does with the proposals what the steps were for."""
        (turn,), (proposed,) = run, proposals
        if turn.plan.kind == "commit":
            return [commit(decoder, turn, proposed)]
        return [self._reveal(decoder, turn, proposed)]

    def _reveal(self, decoder: Decoder, turn: Turn, proposed: Proposals) -> Outcome:
        """Lets the policy choose among the proposals, fresh or standing, and puts tokens into the chosen rows."""
        sample, block, view = turn.sample, turn.block, turn.view
        assert view is not None
        before = (view.changed, block.tokens.copy(), block.masked) if decoder.on_step else None
        block.record_run(turn.plan)
        block.note(turn.plan.predicted, proposed)
        rows = row_list(view.candidates)
        chosen, steps = self.policy.choose(Candidates(rows, tuple(block.confidence[list(rows)].tolist())), view)
        assert chosen, f"{self.policy} made no progress"
        write = sample.request.writer.write
        block.reveal(chosen, np.array([write(block.start + row, *block.noted(row)) for row in row_list(chosen)]))
        block.count_steps(steps, is_last_of_sub_block=chosen == view.candidates)
        sample.ending = ending_of(sample, decoder.decoding.stop_ids)
        if not sample.is_finished and not block.masked and decoder.finished and decoder.finished(sample.generated):
            sample.ending = Ending("stop", block.start + block.size)
        event = None
        if before is not None:
            made = (block.proposed, block.confidence, chosen)
            event = StepEvent(sample, turn.plan, block.start, view.sub_block, *before, *made)
        return Outcome(chosen.bit_count(), event)


def commit(decoder: Decoder, turn: Turn, proposed: Proposals) -> Outcome:
    """After a commit the block is context, and the next one opens."""
    sample = turn.sample
    sample.context += turn.block.tokens.tolist()
    open_block(decoder, sample, proposed)
    return Outcome(revealed=len(proposed.tokens))
