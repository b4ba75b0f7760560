"""Speculative decoding: draft the rows after the last known one, then verify them with a causal forward."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.base_plan import commit_plan, prefill_plan
from stepsaver.engine.batch import BatchContext, Outcome, StepEvent, Turn
from stepsaver.engine.checks import assert_written, new_stamps, stamp_positions
from stepsaver.engine.decoders.decoder import Decoder
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.errors import UsageError
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import Kind, StepPlan, whole_plan
from stepsaver.engine.registry import tuned
from stepsaver.engine.rows import NO_ROWS, Rows, rows_between
from stepsaver.engine.sampling import Proposals, Sampling
from stepsaver.engine.state import Request, Sample


@dataclass
class Draft:
    """A sample's draft that is to be verified next, and how many tokens of its drafts were confirmed so far."""

    verified: int = 0  # positions whose keys and values are final: from a causal forward or a commit
    tokens: tuple[int, ...] = ()  # drafted for the positions after the last known one
    agreed: int = 0  # drafted tokens that were confirmed, over all rounds
    refused: int = 0  # rounds in which a drafted token was not confirmed

    @property
    def acceptance(self) -> float:
        """How likely the next drafted token is confirmed. Starts high, and follows the rounds so far."""
        return (self.agreed + 9) / (self.agreed + self.refused + 10)


@dataclass
class DraftedSample(Sample):
    draft: Draft = field(default_factory=Draft)


@dataclass(frozen=True)
class Speculative(Decoder):
    """One forward drafts the next `span` rows, one causal forward over them keeps what it would have written itself.

    Source: S2D2 (arXiv 2603.25702), which switches between this and denoising; here every round is verified. With
    blocks of one row the same checkpoint is autoregressive. `context=causal` gives that text, token for token: the
    cache holds only what causal forwards computed. With `context=block`, finished blocks are committed as usual, and
    rows are causal only inside the current block, as some checkpoints were trained.
    A draft ends with its block, and is verified up to the first token that ends the text. `span=auto` chooses the
    length that pays most, given the acceptance so far and the cost of rows. `ahead` says whether a verification also
    runs the next draft in the same forward.
    """

    name: ClassVar[str] = "speculative"
    purpose: ClassVar[str] = "the text of autoregressive decoding in fewer forwards, from drafts that are verified"

    span: int | Literal["auto"] = field(default=16, metadata=tuned(16, 12, "auto", 8, is_ordered=False))
    context: Literal["causal", "block"] = field(default="causal", metadata=tuned("causal", "block", is_ordered=False))
    ahead: Literal["auto", "always", "never"] = field(
        default="auto", metadata=tuned("always", "never", is_ordered=False)
    )

    def __post_init__(self) -> None:
        if self.span != "auto" and self.span < 1:
            raise UsageError(f"decoder speculative: span {self.span} is not positive")

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        if not decoding.prediction.opens_blocks:
            raise UsageError(
                "speculative decoding needs rows that predict the token after them, and here each predicts its own"
            )
        if decoding.block_size == 1:
            raise UsageError("speculative decoding drafts the rest of a block, and blocks of one row have none")
        if not (decoding.prefix_cache and decoding.block_cache):
            raise UsageError("speculative decoding keeps what it has verified in the caches, and they are off")

    def check_sampling(self, sampling: Sampling) -> None:
        if not sampling.is_greedy:
            raise UsageError(f"speculative decoding is greedy: temperature {sampling.temperature} is not 0")

    def estimator(self, wanted: Estimator, decoding: DecodingSettings) -> Estimator:
        """Over a causal context, the text is the autoregressive one, and so is its likelihood."""
        if wanted != "trajectory":
            return wanted
        if self.context == "block":
            raise UsageError("speculative decoding with context=block has no trajectory: score with another estimator")
        return "autoregressive"

    def context_block_size(self, decoding: DecodingSettings) -> int:
        return 1 if self.context == "causal" else decoding.block_size

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        joined = super().join(batch, index, request, slot)
        sample = DraftedSample(**vars(joined), draft=Draft(verified=len(joined.context)))
        if batch.checked:
            sample.stamps = new_stamps(sample, request.end + batch.decoding.block_size)
        return sample

    def turns(self, batch: BatchContext, sample: Sample) -> list[Turn]:
        """A draft, the verification of a draft (with the next draft, if that pays), or the commit of a block."""
        draft, block = _draft_of(sample), sample.block
        if not block.masked and self.context == "block":
            steps = [self._commit_step(batch, sample)]
        elif draft.tokens:
            steps = self._verify_steps(batch, sample, draft)
        else:
            first = block.start + block.known - 1
            steps = [self._draft_step(batch, sample, first, int(block.tokens[block.known - 1]))]
            if draft.verified < first:  # the rest of a prompt after its whole blocks
                steps.append(self._causal_step(batch, sample, draft.verified, first))
        assert_written(sample, steps)
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
        span = self.span
        if span == "auto":
            acceptance = round(_draft_of(sample).acceptance, 2)
            span = best_span(acceptance, batch.forward_cost, size)
        return min(span, most)

    def _verify_steps(self, batch: BatchContext, sample: Sample, draft: Draft) -> list[Step]:
        """Runs the drafted tokens as causal rows. The last one is left out if nobody needs what it predicts."""
        block = sample.block
        first, count = block.start + block.known - 1, len(draft.tokens)
        is_carrying = self._carries_next(batch, sample, draft, first + count)
        fills_block = self.context == "block" and first + count + 1 == block.start + block.size
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
        if self.context == "block" and last + 1 == sample.block.start + sample.block.size:
            return False  # the commit comes first
        if self.ahead != "auto":
            return self.ahead == "always"
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
        draft = _draft_of(turn.sample)
        stamp_positions(turn.sample, [each.step for each in run])
        if turn.plan.kind == "draft":
            draft.verified = turn.step.start
            draft.tokens = _up_to_stop(proposed.tokens, batch.decoding.stop_ids)
            return [Outcome(0, _event(batch, turn, proposed, NO_ROWS)), *[Outcome(0)] * (len(run) - 1)]
        if turn.plan.kind == "commit":
            outcome = self.commit(batch, turn, proposed)
            draft.verified = len(turn.sample.context)
            return [outcome]
        return self._accept(batch, run, proposals)

    def _accept(self, batch: BatchContext, run: list[Turn], proposals: list[Proposals]) -> list[Outcome]:
        """Keeps drafted tokens up to the first that the causal rows do not predict, and the token they predict next."""
        (turn, *ahead), (written, *drafted) = run, proposals
        draft = _draft_of(turn.sample)
        agreed = _agreed(draft.tokens, written.tokens)
        is_whole = agreed == len(draft.tokens)
        draft.agreed, draft.refused = draft.agreed + agreed, draft.refused + (not is_whole)
        draft.verified = turn.step.start + min(agreed + 1, turn.plan.rows)
        new = written.tokens[: agreed + 1]  # up to `agreed`, the same as the draft's
        draft.tokens = _up_to_stop(drafted[0].tokens, batch.decoding.stop_ids) if drafted and is_whole else ()
        event = _event(batch, turn, written, rows_between(1, 1 + len(new)))
        turn.sample.confidences.update(enumerate(written.confidence[: len(new)].tolist(), turn.step.start + 1))
        self._write(batch, turn.sample, new, written.confidence)
        outcomes = [Outcome(len(new), event)]
        if ahead:
            outcomes.append(Outcome(0, _event(batch, ahead[0], drafted[0], NO_ROWS)))
        return outcomes

    def _write(
        self, batch: BatchContext, sample: Sample, tokens: NDArray[np.int64], confidence: NDArray[np.float64]
    ) -> None:
        """Puts verified tokens into the block. Tokens that do not fit open the next block."""
        block, size = sample.block, sample.block.size
        known = block.known
        fitting = min(len(tokens), size - known)
        block.confidence[known : known + fitting] = confidence[:fitting]
        block.reveal(rows_between(known, known + fitting), tokens[:fitting])
        self.end_if_over(batch, sample, new=fitting)
        rest = tokens[fitting:].tolist()
        while rest and not sample.is_finished:
            sample.context += sample.block.tokens.tolist()
            self.begin_block(batch, sample, tuple(rest[:size]))
            rest = rest[size:]


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


def _draft_of(sample: Sample) -> Draft:
    assert isinstance(sample, DraftedSample)
    return sample.draft


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
        turn.sample,
        turn.plan,
        turn.step.start,
        rows,
        NO_ROWS,
        tokens,
        rows,
        predicted,
        confidence,
        revealed,
        turn.plan,
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
