"""The moves of verified drafts: draft the rows after the last known one, then check them with a causal forward."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.base_plan import commit_plan, prefill_plan
from stepsaver.engine.batch import BatchContext, Outcome, StepEvent, Turn
from stepsaver.engine.checks import assert_verified, stamp_positions
from stepsaver.engine.denoise import begin_block, commit, join_in_blocks
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import Kind, StepPlan, whole_plan
from stepsaver.engine.policies.verified import Verified
from stepsaver.engine.rows import NO_ROWS, Rows, rows_between
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import NEVER, Ending, Request, Sample, ending_of


@dataclass
class Draft:
    """A sample's draft that is to be verified next, and how many tokens of its drafts were confirmed so far."""

    verified: int  # positions whose keys and values are final: from a causal forward or a commit
    tokens: tuple[int, ...] = ()  # drafted for the positions after the last known one
    agreed: int = 0  # drafted tokens that were confirmed, over all rounds
    refused: int = 0  # rounds in which a drafted token was not confirmed
    stamps: NDArray[np.int64] | None = None  # per position, the token its keys were computed with; only if checked

    @property
    def acceptance(self) -> float:
        """How likely the next drafted token is confirmed. Starts high, and follows the rounds so far."""
        return (self.agreed + 9) / (self.agreed + self.refused + 10)


@dataclass
class Verifying:
    """Drafts and verifies. Keeps the drafts of the samples of one decode."""

    policy: Verified
    drafts: dict[int, Draft] = field(default_factory=dict)  # by the sample's index

    @property
    def context_block_size(self) -> int | None:
        return 1 if self.policy.context == "causal" else None

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        sample = join_in_blocks(batch, index, request, slot)
        draft = self.drafts[index] = Draft(verified=len(sample.context))
        if batch.checked:
            draft.stamps = np.full(request.end + batch.decoding.block_size, NEVER)
            draft.stamps[: draft.verified] = sample.context
        return sample

    def turns(self, batch: BatchContext, sample: Sample) -> list[Turn]:
        """A draft, the verification of a draft (with the next draft, if that pays), or the commit of a block."""
        draft, block = self.drafts[sample.index], sample.block
        if not block.masked and self.policy.context == "block":
            steps = [self._commit_step(batch, sample)]
        elif draft.tokens:
            steps = self._verify_steps(batch, sample, draft)
        else:
            first = block.start + block.known - 1
            steps = [self._draft_step(batch, sample, first, int(block.tokens[block.known - 1]))]
            if draft.verified < first:  # the rest of a prompt after its whole blocks
                steps.append(self._causal_step(batch, sample, draft.verified, first))
        if draft.stamps is not None:
            assert_verified(steps, draft.stamps, [*sample.context, *block.tokens[: block.known].tolist()])
        return [Turn(sample, block, step) for step in steps]

    def _draft_step(self, batch: BatchContext, sample: Sample, first: int, token: int) -> Step:
        """The last known row and the masked rows that predict the span's tokens. All of them see each other. The last
        token's own row would predict the token after the span: it is not there.
        """
        count = self._span(batch, sample, first)
        tokens = np.array([token] + [batch.decoding.mask_id] * (count - 1))
        plan = _plan(batch, "draft", rows=count, reads=count)
        return Step(sample.slot, first, tokens, len(tokens), plan)

    def _span(self, batch: BatchContext, sample: Sample, first: int) -> int:
        """How many tokens to draft after position `first`: not beyond the next token's block, nor beyond the limit."""
        size = batch.decoding.block_size
        most = min((first + 1) // size * size + size, sample.request.end) - first - 1
        span = self.policy.span
        if span == "auto":
            acceptance = round(self.drafts[sample.index].acceptance, 2)
            span = best_span(acceptance, batch.forward_cost, size)
        return min(span, most)

    def _verify_steps(self, batch: BatchContext, sample: Sample, draft: Draft) -> list[Step]:
        """Runs the drafted tokens as causal rows. The last one is left out if nobody needs what it predicts."""
        block = sample.block
        first, count = block.start + block.known - 1, len(draft.tokens)
        is_carrying = self._carries_next(batch, sample, draft, first + count)
        fills_block = self.policy.context == "block" and first + count + 1 == block.start + block.size
        ends_text = draft.tokens[-1] in batch.decoding.stop_ids
        rows = count if is_carrying or fills_block or ends_text else count + 1
        tokens = np.array([block.tokens[block.known - 1], *draft.tokens][:rows])
        steps = [Step(sample.slot, first, tokens, 1, _plan(batch, "verify", rows=rows, reads=rows))]
        if is_carrying:
            steps.append(self._draft_step(batch, sample, first + count, draft.tokens[-1]))
        return steps

    def _carries_next(self, batch: BatchContext, sample: Sample, draft: Draft, last: int) -> bool:
        """Whether the next draft, after position `last`, runs in the same forward, betting that this draft is right."""
        if last + 1 >= sample.request.end or draft.tokens[-1] in batch.decoding.stop_ids:
            return False
        if self.policy.context == "block" and last + 1 == sample.block.start + sample.block.size:
            return False  # the commit comes first
        if self.policy.ahead != "auto":
            return self.policy.ahead == "always"
        whole = draft.acceptance ** len(draft.tokens)
        wasted_rows = self._span(batch, sample, last)
        return whole * batch.forward_cost > (1 - whole) * wasted_rows

    def _causal_step(self, batch: BatchContext, sample: Sample, start: int, stop: int) -> Step:
        text = [*sample.context, *sample.block.tokens.tolist()]
        plan = prefill_plan(stop - start, reads_last=False, layers=batch.model.config.layers)
        return Step(sample.slot, start, np.array(text[start:stop]), 1, plan)

    def _commit_step(self, batch: BatchContext, sample: Sample) -> Step:
        block = sample.block
        plan = commit_plan(block.size, layers=batch.model.config.layers)
        return Step(sample.slot, block.start, block.tokens, block.size, plan)

    def take(self, batch: BatchContext, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
        turn, proposed = run[0], proposals[0]
        draft = self.drafts[turn.sample.index]
        if draft.stamps is not None:
            for each in run:
                stamp_positions(draft.stamps, each.step)
        if turn.plan.kind == "draft":
            draft.verified = turn.step.start
            draft.tokens = _up_to_stop(proposed.tokens, batch.decoding.stop_ids)
            return [Outcome(0, _event(batch, turn, proposed, NO_ROWS)), *[Outcome(0)] * (len(run) - 1)]
        if turn.plan.kind == "commit":
            outcome = commit(batch, turn, proposed)
            draft.verified = len(turn.sample.context)
            return [outcome]
        return self._accept(batch, run, proposals)

    def _accept(self, batch: BatchContext, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
        """Keeps drafted tokens up to the first that the causal rows do not predict, and the token they predict next."""
        (turn, *ahead), (written, *drafted) = run, proposals
        draft = self.drafts[turn.sample.index]
        agreed = _agreed(draft.tokens, written.tokens)
        is_whole = agreed == len(draft.tokens)
        draft.agreed, draft.refused = draft.agreed + agreed, draft.refused + (not is_whole)
        draft.verified = turn.step.start + min(agreed + 1, turn.plan.rows)
        new = written.tokens[: agreed + 1]  # up to `agreed`, the same as the draft's
        draft.tokens = _up_to_stop(drafted[0].tokens, batch.decoding.stop_ids) if drafted and is_whole else ()
        event = _event(batch, turn, written, rows_between(1, 1 + len(new)))
        _write(batch, turn.sample, new, written.confidence)
        outcomes = [Outcome(len(new), event)]
        if ahead:
            outcomes.append(Outcome(0, _event(batch, ahead[0], drafted[0], NO_ROWS)))
        return outcomes


def _plan(batch: BatchContext, kind: Kind, *, rows: int, reads: int) -> StepPlan:
    """A plan of all layers on `rows` rows that reads the first `reads`."""
    return whole_plan(
        kind,
        window=rows_between(0, rows),
        reads=rows_between(0, reads),
        layers=batch.model.config.layers,
        prediction=batch.decoding.prediction,
    )


def _up_to_stop(drafted: NDArray[np.int64], stop_ids: Collection[int]) -> tuple[int, ...]:
    """The drafted tokens up to the first that ends the text: those after it would be verified for nobody."""
    tokens = drafted.tolist()
    stop = next((index for index, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tuple(tokens[: stop + 1])


def _agreed(drafted: tuple[int, ...], written: NDArray[np.int64]) -> int:
    """How many drafted tokens match what the causal rows predict, up to the first that differs."""
    count = min(len(drafted), len(written))
    differing = np.flatnonzero(np.array(drafted[:count]) != written[:count])
    return int(differing[0]) if len(differing) else count


def _write(batch: BatchContext, sample: Sample, tokens: NDArray[np.int64], confidence: NDArray[np.float64]) -> None:
    """Puts verified tokens into the block. Tokens that do not fit open the next block."""
    known = sample.block.known
    fitting = min(len(tokens), sample.block.size - known)
    sample.block.confidence[known : known + fitting] = confidence[:fitting]
    sample.block.reveal(rows_between(known, known + fitting), tokens[:fitting])
    sample.ending = ending_of(sample, batch.decoding.stop_ids)
    rest = tokens[fitting:].tolist()
    while rest and not sample.is_finished:
        sample.context += sample.block.tokens.tolist()
        size = sample.block.size
        begin_block(batch, sample, tuple(rest[:size]))
        rest = rest[size:]
    if not sample.is_finished and batch.finished and batch.finished(sample.generated):
        sample.ending = Ending("stop", sample.block.start + sample.block.known)


def _event(batch: BatchContext, turn: Turn, proposed: Proposals, revealed: Rows) -> StepEvent | None:
    """The event for `on_step`: the rows of the step, and the row after them, whose token the step may predict."""
    if batch.on_step is None:
        return None
    tokens = np.append(turn.step.tokens, batch.decoding.mask_id)
    predicted, confidence = np.full(len(tokens), batch.decoding.mask_id), np.full(len(tokens), np.nan)
    predicted[1 : 1 + len(proposed.tokens)] = proposed.tokens
    confidence[1 : 1 + len(proposed.tokens)] = proposed.confidence
    rows = rows_between(1, len(tokens))
    return StepEvent(
        turn.sample, turn.plan, turn.step.start, rows, NO_ROWS, tokens, rows, predicted, confidence, revealed
    )


@lru_cache(maxsize=4096)
def best_span(acceptance: float, forward_rows: float, most: int) -> int:
    """The span that gives the most tokens for the cost of a draft, of `span` rows, and a verification, of one more. A
    forward costs its rows plus `forward_rows`.
    """

    def tokens_per_row(span: int) -> float:
        tokens = sum(acceptance**count for count in range(span + 1))
        return tokens / (2 * forward_rows + 2 * span + 1)

    return max(range(1, most + 1), key=tokens_per_row)
