"""The moves of block diffusion: denoising steps until no row of the block is masked, then a commit."""

import numpy as np

from stepsaver.engine.checks import assert_current
from stepsaver.engine.decode.policy import Candidates
from stepsaver.engine.decoder import Decoder, Outcome, StepEvent, Turn, view_of
from stepsaver.engine.packing import Step
from stepsaver.engine.reuse.rule import plan_commit, plan_step
from stepsaver.engine.rows import row_index, row_list
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Ending, Request, Sample, ending_of, new_block


def join(decoder: Decoder, index: int, request: Request, slot: int) -> Sample:
    """A sample with its slot. The prompt's whole blocks are context, the rest opens the first block."""
    whole = len(request.prompt) // decoder.decoding.block_size * decoder.decoding.block_size
    block = _new_block(decoder, request, whole, request.prompt[whole:])
    sample = Sample(index, request, slot, context=list(request.prompt[:whole]), block=block)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    return sample


def open_block(decoder: Decoder, sample: Sample, proposed: Proposals) -> None:
    """Starts the block after the context: with the token that the context predicts, if it predicts one."""
    start = len(sample.context)
    given = [sample.request.writer.write(start, *each) for each in proposed.each()]
    sample.block = _new_block(decoder, sample.request, start, tuple(given))
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)


def _new_block(decoder: Decoder, request: Request, start: int, given: tuple[int, ...]) -> BlockState:
    return new_block(
        start, given, decoding=decoder.decoding, layers=decoder.model.config.layers, last=request.writer.last
    )


def turns(decoder: Decoder, sample: Sample) -> list[Turn]:
    """The sample's next step: a denoising step, or the commit of a block without rows to reveal."""
    block, view = sample.block, view_of(decoder, sample.block)
    plan = plan_step(view, decoder.rules) if block.masked & ~block.sealed else plan_commit(view, decoder.rules)
    if decoder.checked:
        assert_current(plan, view)
    return [Turn(sample, block, Step(sample.slot, block.start, block.tokens, block.size, plan), view)]


def take(decoder: Decoder, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
    """Does with the proposals what the steps were for."""
    (turn,), (proposed,) = run, proposals
    return [_commit(decoder, turn, proposed) if turn.plan.kind == "commit" else _reveal(decoder, turn, proposed)]


def _commit(decoder: Decoder, turn: Turn, proposed: Proposals) -> Outcome:
    """After a commit the block is context, and the next one opens."""
    sample = turn.sample
    sample.context += turn.block.tokens.tolist()
    open_block(decoder, sample, proposed)
    return Outcome(revealed=len(proposed.tokens))


def _reveal(decoder: Decoder, turn: Turn, proposed: Proposals) -> Outcome:
    """Lets the policy choose among the proposals, fresh or standing, and puts tokens into the chosen rows."""
    sample, block, view = turn.sample, turn.block, turn.view
    assert view is not None
    before = (view.changed, block.tokens.copy()) if decoder.on_step else None
    block.record_run(turn.plan)
    block.note(turn.plan.predicted, proposed)
    rows = row_list(view.candidates)
    chosen, steps = decoder.policy.choose(Candidates(rows, tuple(block.confidence[list(rows)].tolist())), view)
    assert chosen, f"{decoder.policy} made no progress"
    write = sample.request.writer.write
    block.reveal(chosen, np.array([write(block.start + row, *block.noted(row)) for row in row_index(chosen).tolist()]))
    block.count_steps(steps, is_last_of_sub_block=chosen == view.candidates)
    sample.ending = ending_of(sample, decoder.decoding.stop_ids)
    if not sample.is_finished and not block.masked and decoder.finished and decoder.finished(sample.generated):
        sample.ending = Ending("stop", block.start + block.size)
    event = None
    if before is not None:
        event = StepEvent(sample, turn.plan, view.sub_block, *before, block.proposed, block.confidence, chosen)
    return Outcome(chosen.bit_count(), event)
