"""Block diffusion: denoising steps until no position of the block is masked, then a commit."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from stepsaver.engine.batch import BatchContext, Outcome, ScheduledStep, StepEvent, view_of
from stepsaver.engine.checks import assert_current
from stepsaver.engine.decoders.decoder import Decoder, fresh_block
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError, shown
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import StepPlan, opening_readers
from stepsaver.engine.plugins import raise_fault
from stepsaver.engine.policies.policy import Candidates, Policy
from stepsaver.engine.policies.threshold import Threshold
from stepsaver.engine.positions import Positions, position_index, position_list
from stepsaver.engine.rules.rule import Rule, base_plan, check_rules, plan_commit, plan_step
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import BlockState, Sample
from stepsaver.engine.view import StepView

DEFAULT = Threshold()


@dataclass(frozen=True)
class Denoise(Decoder):
    """The policy chooses which positions a step unmasks. The rules choose what it computes.

    Where commits are joined, a commit's forward also runs the next block's first step. The first token of that block is
    guessed: it is what the last step read from the last position. The commit then tells whether the guess was right; if
    not, the step is run again. Either way the tokens are the same as with separate forwards.
    """

    name: ClassVar[str] = "block"
    purpose: ClassVar[str] = "block diffusion: a policy unmasks tokens step by step, and rules leave work out"
    asks_after_every_token: ClassVar[bool] = False

    policy: Policy = DEFAULT
    rules: tuple[Rule, ...] = ()

    @property
    def text(self) -> str:
        """Policy and rules are options of their own."""
        return self.name

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        if decoding.prediction.has_causal_context and decoding.sub_block_size != decoding.block_size:
            raise UsageError(f"sub-blocks of {decoding.sub_block_size}: this model decodes its blocks as a whole")
        check_rules(self.rules, decoding, layers)

    def next_steps(self, batch: BatchContext, sample: Sample) -> list[ScheduledStep]:
        """A denoising step, or, if nothing is left to unmask, the commit, maybe with the next block's first step."""
        block = sample.block
        if block.masked & ~block.never_unmasked:
            return [self._denoise(batch, sample, block)]
        view = view_of(batch, block)
        scheduled = [_scheduled(batch, sample, block, view, plan_commit(view, self.rules))]
        if batch.joins.commits:
            following = self._guessed_block(batch, sample)
            scheduled += [] if following is None else [self._denoise(batch, sample, following)]
        return scheduled

    def _denoise(self, batch: BatchContext, sample: Sample, block: BlockState) -> ScheduledStep:
        view = view_of(batch, block)
        plan = plan_step(view, self.rules)
        if batch.joins.commits and view.candidates == block.masked and not plan.is_empty:
            plan = plan.also_reading(opening_readers(block.size, view.prediction))
        return _scheduled(batch, sample, block, view, plan)

    def _guessed_block(self, batch: BatchContext, sample: Sample) -> BlockState | None:
        """The block after the one being committed, if the guess is right; None without a guess or masks."""
        block, writer = sample.block, sample.request.writer
        start = block.start + block.size
        given: tuple[int, ...] = ()
        if batch.decoding.prediction.opens_blocks:
            wanted = writer.targets(start)[:1] or (() if block.opening is None else (block.opening,))
            if not wanted or wanted[0] in batch.decoding.stop_ids:
                return None
            given = wanted
        following = fresh_block(batch, sample.request, start, given)
        is_needed = start + len(given) < sample.request.end and following.masked & ~following.never_unmasked
        return following if is_needed else None

    def postprocess(self, batch: BatchContext, run: list[ScheduledStep], proposals: list[Proposals]) -> list[Outcome]:
        """Unmasks positions after a denoising step; after a commit, goes on with the next block."""
        if run[0].plan.kind != "commit":
            return [self._unmask(batch, run[0], proposals[0])]
        outcomes = [self.commit(batch, run[0], proposals[0])]
        for step, proposed in zip(run[1:], proposals[1:], strict=True):
            outcomes.append(self._follow(batch, step, proposed))
        return outcomes

    def _follow(self, batch: BatchContext, step: ScheduledStep, proposed: Proposals) -> Outcome:
        """Goes on with the guessed block if it equals the block that the commit opened."""
        sample = step.sample
        if sample.is_finished or not np.array_equal(sample.block.tokens, step.block.tokens):
            return Outcome(0, guess="wrong")
        sample.block = step.block
        return self._unmask(batch, step, proposed)._replace(guess="right")

    def _unmask(self, batch: BatchContext, step: ScheduledStep, proposed: Proposals) -> Outcome:
        """Lets the policy choose among new and earlier proposals, and puts tokens into the chosen positions."""
        sample, block, view = step.sample, step.block, step.view
        assert view is not None
        before = (view.changed, block.tokens.copy(), block.masked) if batch.on_step else None
        block.record_run(step.plan)
        block.note(step.plan.predicted, proposed)
        positions = position_list(view.candidates)
        confidences = tuple(block.confidence[position_index(view.candidates)].tolist())
        chosen = self._choose(Candidates(positions, confidences), view)
        write = sample.request.writer.write
        block.unmask(
            chosen,
            np.array([write(block.start + position, *block.noted(position)) for position in position_list(chosen)]),
        )
        sample.confidences.update(
            (block.start + position, float(block.confidence[position])) for position in position_list(chosen)
        )
        block.count_step(is_last_of_sub_block=chosen == view.candidates)
        self.end_if_over(batch, sample, new=chosen.bit_count())
        event = None
        if before is not None:
            made = (block.proposed, block.confidence, chosen)
            unruled = base_plan(view)
            event = StepEvent(sample, step.plan, block.start, view.sub_block, *before, *made, unruled)
        return Outcome(chosen.bit_count(), event)

    def _choose(self, candidates: Candidates, view: StepView) -> Positions:
        try:
            chosen = self.policy.choose(candidates, view)
            assert isinstance(chosen, int), f"it chose {shown(chosen)}, which is no set of positions"
            assert 0 < chosen == chosen & view.candidates, f"it chose {bin(chosen)} of {bin(view.candidates)}"
        except Exception as error:
            raise_fault("policy", self.policy, error)
        return chosen


def _scheduled(batch: BatchContext, sample: Sample, block: BlockState, view: StepView, plan: StepPlan) -> ScheduledStep:
    if batch.checked:
        assert_current(plan, view)
    is_causal = plan.kind == "commit" and view.prediction.has_causal_context
    return ScheduledStep(
        sample, block, Step(sample.slot, block.start, block.tokens, 1 if is_causal else block.size, plan), view
    )
