"""Autoregressive decoding: one forward per token."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from stepsaver.engine.batch import BatchContext, Outcome, ScheduledStep
from stepsaver.engine.checks import assert_written, new_stamps, stamp_positions
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.positions import positions_between
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import Request, Sample


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Writes the text from left to right, each token from all tokens before it.

    Where a position predicts the token after it, a forward runs the last token. Where a position predicts its own
    token, it runs the last token and a masked position after it. Either way the last token's keys and values are final,
    so a forward commits one token and proposes the next. Blocks mean nothing here: each has one position.
    """

    name: ClassVar[str] = "autoregressive"
    purpose: ClassVar[str] = "one forward per token: what every other way of decoding the same checkpoint is beside"

    has_blocks: ClassVar[bool] = False

    def settled(self, decoding: DecodingSettings) -> DecodingSettings:
        return replace(decoding, block_size=1, sub_block_size=1)

    def estimator(self, wanted: Estimator, decoding: DecodingSettings) -> Estimator:
        """One forward scores all tokens."""
        return "autoregressive" if wanted == "trajectory" else wanted

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        sample = super().join(batch, index, request, slot)
        if batch.checked:
            sample.stamps = new_stamps(sample, request.end + 1)
        return sample

    def next_steps(self, batch: BatchContext, sample: Sample) -> list[ScheduledStep]:
        block = sample.block
        predicts_itself = not batch.decoding.prediction.opens_blocks
        tokens = block.tokens
        if predicts_itself and not block.masked:
            tokens = np.append(tokens, batch.decoding.mask_id)
        count = len(tokens)
        plan = whole_plan(
            "commit",
            window=positions_between(0, count),
            reads=positions_between(count - 1, count),
            layers=batch.model.config.layers,
            prediction=batch.decoding.prediction.of_context,
        )
        step = Step(sample.slot, block.start, tokens, 1, plan)
        assert_written(sample, [step])
        return [ScheduledStep(sample, block, step)]

    def postprocess(self, batch: BatchContext, run: list[ScheduledStep], proposals: list[Proposals]) -> list[Outcome]:
        """The block's token becomes context, and the proposed token is the next block."""
        (scheduled,), (proposed,) = run, proposals
        stamp_positions(scheduled.sample, [scheduled.step])
        if not scheduled.block.masked:
            return [self.commit(batch, scheduled, proposed)]
        self.open(batch, scheduled.sample, proposed)  # the first token after a prompt that predicts none
        return [Outcome(unmasked=len(proposed.tokens))]
