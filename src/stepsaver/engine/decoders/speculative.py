"""Speculative decoding: causal positions verify a draft, and branches beside them write the next one."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.batch import BatchContext, Branch, Outcome, ScheduledStep, StepEvent
from stepsaver.engine.checks import assert_written, new_stamps, stamp_positions
from stepsaver.engine.decoders.budget import MOST, PLANNING, Acceptance, Budget, Costs, allocate, best_budget
from stepsaver.engine.decoders.decoder import Decoder, fresh_block
from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.errors import UsageError
from stepsaver.engine.packing import Layout, Step
from stepsaver.engine.plan import Kind, whole_plan
from stepsaver.engine.positions import NO_POSITIONS, positions_between
from stepsaver.engine.registry import tuned
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.state import Request, Sample, ending_of

UNMEASURED = 16  # positions, until it is measured what a forward costs


@dataclass(frozen=True)
class Tokens:
    """What a model predicted for consecutive positions, and how sure it was."""

    ids: NDArray[np.int64]
    confidence: NDArray[np.float64]

    def __getitem__(self, some: slice | NDArray[np.int64]) -> "Tokens":
        return Tokens(self.ids[some], self.confidence[some])

    def __add__(self, others: "Tokens") -> "Tokens":
        return Tokens(np.append(self.ids, others.ids), np.append(self.confidence, others.confidence))


NONE = Tokens(np.empty(0, dtype=np.int64), np.empty(0))


class Round(NamedTuple):
    """What a forward verifies, and how many positions the branch of each number of accepted tokens has."""

    draft: Tokens
    branches: list[int]


@dataclass
class DraftedSample(Sample):
    final: int = 0  # positions whose keys and values are not computed again, unless their block is committed
    draft: Tokens = NONE  # for the positions after the known ones
    acceptance: Acceptance = field(default_factory=Acceptance)
    round: Round = field(default_factory=lambda: Round(NONE, [0]))  # of the forward that runs

    @property
    def known(self) -> int:
        return self.block.start + self.block.known

    def tokens(self, start: int, stop: int) -> list[int]:
        """The known tokens at some positions."""
        before = self.block.start
        return self.context[start:stop] + self.block.tokens[max(start - before, 0) : max(stop - before, 0)].tolist()


class _Rows(NamedTuple):
    """The positions of a step while it is put together: token, position, place, what it sees, and its branch."""

    lines: list[tuple[int, int, int, int, int, int, int, int]]
    read: list[int]

    def add(
        self,
        token: int,
        position: int,
        place: int,
        view: tuple[int, int, int],
        *,
        branch: int = -1,
        predicts: int | None = None,
    ) -> None:
        if predicts is not None:
            self.read.append(len(self.lines))
        self.lines.append((token, position, place, *view, branch, -1 if predicts is None else predicts))

    def step(self, batch: BatchContext, sample: Sample, kind: Kind) -> Step:
        columns = np.array(self.lines, dtype=np.int64)
        plan = whole_plan(
            kind,
            window=positions_between(0, len(self.lines)),
            reads=sum(1 << row for row in self.read),
            layers=batch.model.config.layers,
            prediction=batch.decoding.prediction.of_context,
        )
        layout = Layout(
            columns[:, 1], columns[:, 2], np.ascontiguousarray(columns[:, 3:6]), columns[:, 6], columns[:, 7]
        )
        return Step(sample.slot, self.lines[0][1], columns[:, 0], 1, plan, layout)


@dataclass(frozen=True)
class Speculative(Decoder):
    """The text of autoregressive decoding, sampled or greedy, several tokens a forward.

    A forward runs the drafted tokens as causal positions, which tell how many of them are right and write the token
    after those. Beside them run branches: for a number of accepted tokens, masks in place of what follows, which see
    the text, so many drafted tokens, and each other. The branch of the number that was accepted is the next draft.
    Where a position predicts its own token, a masked copy of each drafted position verifies it, and a branch goes on
    from the copy. Sources: S2D2 (arXiv 2603.25702), TiDAR (arXiv 2511.08923), which has a branch for every number.

    `positions`: the most positions that a sample's forward has, beside what a prompt or a block's commit takes. With 0
    one forward drafts and the next verifies. `auto` takes as many as pay, by the measured cost of a forward.
    `span`: the most positions of a branch, or of a forward that only drafts, the last known token's included.
    `context=block`: finished blocks are committed as block diffusion does it, and text is causal inside a block only,
    as some checkpoints were trained.
    """

    name: ClassVar[str] = "speculative"
    purpose: ClassVar[str] = "the text of autoregressive decoding in fewer forwards, from drafts that are verified"

    positions: int | Literal["auto"] = field(default="auto", metadata=tuned("auto", 0, 8, 16, 32, is_ordered=False))
    span: int = field(default=16, metadata=tuned(16, 32, is_ordered=False))
    context: Literal["causal", "block"] = field(default="causal", metadata=tuned("causal", "block", is_ordered=False))

    @property
    def needs_curve(self) -> bool:
        return self.positions == "auto"

    def __post_init__(self) -> None:
        if self.positions != "auto" and not (self.positions == 0 or 2 <= self.positions <= 256):
            raise UsageError(f"decoder speculative: positions {self.positions} is neither 0 nor from 2 to 256")
        if not 1 <= self.span <= 256:
            raise UsageError(f"decoder speculative: span {self.span} is not from 1 to 256")

    def check(self, decoding: DecodingSettings, layers: int) -> None:
        if decoding.prediction.has_causal_context and self.context == "block":
            raise UsageError("speculative decoding with context=block commits blocks, and here the context is causal")
        if decoding.block_size == 1 and not decoding.prediction.has_causal_context:
            raise UsageError("speculative decoding with blocks of one position is autoregressive: ask for that")
        if not (decoding.prefix_cache and decoding.block_cache):
            raise UsageError("speculative decoding keeps what it has verified in the caches, and they are off")

    def estimator(self, wanted: Estimator, decoding: DecodingSettings) -> Estimator:
        """Over a causal context, the text is the autoregressive one, and so is its likelihood."""
        if wanted != "trajectory":
            return wanted
        if self.context == "block":
            raise UsageError("speculative decoding with context=block has no trajectory: score with another estimator")
        return "autoregressive"

    def context_block_size(self, decoding: DecodingSettings) -> int:
        return 1 if self.context == "causal" else decoding.block_size

    def further_places(self, decoding: DecodingSettings) -> int:
        """Branches and copies lie behind the draft."""
        return (MOST if self.positions == "auto" else max(self.positions, self.span + 1)) + decoding.block_size

    def join(self, batch: BatchContext, index: int, request: Request, slot: int) -> Sample:
        """The prompt's last token, or its last block, is left to the first round. A causal context is the whole prompt,
        which writes the first token.
        """
        size, is_left = self.context_block_size(batch.decoding), not batch.decoding.prediction.has_causal_context
        start = (len(request.prompt) - is_left) // size * size
        block = fresh_block(batch, request, start, request.prompt[start:])
        sample = DraftedSample(index, request, slot, list(request.prompt[:start]), block, final=start)
        sample.ending = ending_of(sample, batch.decoding.stop_ids)
        if batch.checked:
            sample.stamps = new_stamps(sample, request.end + self.further_places(batch.decoding))
        return sample

    def next_steps(self, batch: BatchContext, sample: Sample) -> list[ScheduledStep]:
        assert isinstance(sample, DraftedSample)
        budget, limit = self._budget(batch, sample), self._limit(sample)
        is_draft = not budget.positions and not len(sample.draft.ids) and limit - sample.known > 1
        if is_draft and not self._commits(sample):
            step = self._draft_step(batch, sample, min(limit - sample.known, budget.span))
        else:
            step = self._round_step(batch, sample, budget, limit)
        assert_written(sample, [step])
        return [ScheduledStep(sample, sample.block, step)]

    def _commits(self, sample: DraftedSample) -> bool:
        return self.context == "block" and not sample.block.masked

    def _limit(self, sample: DraftedSample) -> int:
        """The first position that the next forward cannot write a token for."""
        block, end = sample.block, sample.request.end
        if self.context == "causal":
            return end
        return min(end, block.start + block.size * (2 if self._commits(sample) else 1))

    def _budget(self, batch: BatchContext, sample: DraftedSample) -> Budget:
        if self.positions != "auto":
            return Budget(self.positions, self.span)
        curve = batch.curve
        if curve is None:
            return Budget(UNMEASURED, self.span)
        acceptance = batch.remembered.setdefault("acceptance", Acceptance())  # of all samples
        chance, seen = min(round(acceptance.mean * 20) / 20, 0.98), -(-sample.known // 64) * 64
        if (chance, seen) not in batch.remembered:
            batch.remembered[chance, seen] = best_budget(
                chance,
                self.span,
                _costs(batch),
                lambda positions: curve.seconds(batch.slots * positions, seen),
                planning=PLANNING * batch.slots,
            )
        return batch.remembered[chance, seen]

    def _draft_step(self, batch: BatchContext, sample: DraftedSample, span: int) -> Step:
        """The last known token and masks, all of which see each other; what comes before and has no keys is causal."""
        rows, last, shift = _Rows([], []), sample.known - 1, batch.decoding.prediction.shift
        *before, token = sample.tokens(min(sample.final, last), last + 1)
        for position, each in enumerate(before, last - len(before)):
            rows.add(each, position, position, (position + 1, 0, 0))
        stop = last + max(span, 2 - shift)
        for position in range(last, stop):
            predicts = position + shift if position + shift > last else None
            each = token if position == last else batch.decoding.mask_id
            rows.add(each, position, position, (stop, 0, 0), branch=0, predicts=predicts)
        return rows.step(batch, sample, "draft")

    def _round_step(self, batch: BatchContext, sample: DraftedSample, budget: Budget, limit: int) -> Step:
        """Text without final keys, drafted tokens, their masked copies where these verify, and branches."""
        sample.round = draft, branches = self._round(batch, sample, budget, limit)
        rows, known, prediction = _Rows([], []), sample.known, batch.decoding.prediction
        commits, verifies = self._commits(sample), prediction.opens_blocks
        start = sample.block.start if commits else min(sample.final, known - 1)
        for position, token in enumerate(sample.tokens(start, known), start):
            view = (known if commits else position + 1, 0, 0)
            rows.add(token, position, position, view, predicts=known if verifies and position == known - 1 else None)
        ids = draft.ids.tolist()
        stop = place = known + len(ids)
        ends = bool(ids) and (ids[-1] in batch.decoding.stop_ids or stop == sample.request.end)
        for position, token in enumerate(ids[:-1] if verifies and ends else ids, known):
            view = (position + 1, 0, 0)
            rows.add(token, position, position, view, predicts=position + 1 if verifies else None)
        for accepted, count in enumerate(branches):
            position, has_copy = known + accepted, not verifies and not (ends and accepted == len(ids))
            # masks that predict their own token begin where the verification writes: with the copy, or with one more
            width = count + (not prediction.shift) if count or has_copy else 0
            for index in range(width):
                is_copy, predicted = has_copy and not index, position + index + prediction.shift
                view = (place + (1 if is_copy else width), position, place)
                predicts = predicted if is_copy or predicted > position else None
                rows.add(
                    batch.decoding.mask_id, position + index, place + index, view, branch=accepted, predicts=predicts
                )
            place += width
        return rows.step(batch, sample, "verify")

    def _round(self, batch: BatchContext, sample: DraftedSample, budget: Budget, limit: int) -> Round:
        known, end = sample.known, sample.request.end
        draft = sample.draft[: limit - known]
        count = len(draft.ids)
        if not budget.positions:
            return Round(draft, [0] * (count + 1))
        caps = [min(budget.span, self._room(sample, known + accepted, limit)) for accepted in range(count + 1)]
        if count and (draft.ids[-1] in batch.decoding.stop_ids or known + count == end):
            caps[-1] = 0
        chances = sample.acceptance.chances(draft.confidence)
        verified, branches = allocate(chances, budget.positions, caps, _costs(batch))
        return Round(draft[:verified], branches)

    def _room(self, sample: DraftedSample, position: int, limit: int) -> int:
        """How many tokens a branch may draft behind a token at `position`: up to the end of the block after it."""
        end = sample.request.end
        if self.context == "block":
            end = min(end, limit if position + 1 < limit else limit + sample.block.size)
        return max(end - position - 1, 0)

    def postprocess(self, batch: BatchContext, run: list[ScheduledStep], proposals: list[Proposals]) -> list[Outcome]:
        (scheduled,), (proposed,) = run, proposals
        sample = scheduled.sample
        assert isinstance(sample, DraftedSample)
        stamp_positions(sample, [scheduled.step])
        made = Tokens(proposed.tokens, proposed.confidence)
        if scheduled.plan.kind == "verify":
            return [self._accept(batch, scheduled, sample, made)]
        known = sample.known
        sample.final, sample.draft = known - 1, _up_to_stop(made, batch.decoding.stop_ids)
        event = _event(batch, scheduled, NONE, made)
        return [Outcome(0, event)]

    def _accept(self, batch: BatchContext, scheduled: ScheduledStep, sample: DraftedSample, made: Tokens) -> Outcome:
        """Keeps drafted tokens up to the first that is not what the forward writes there, and the token written then.
        Where that token's block has to be committed first, it is only the beginning of the next draft.
        """
        (draft, branches), known, limit = sample.round, sample.known, self._limit(sample)
        written, drafted = _split(made, branches, is_mixed=not batch.decoding.prediction.opens_blocks)
        agreed = _agreed(draft.ids, written.ids)
        sample.acceptance.note(draft.confidence, agreed)
        if self.needs_curve:
            batch.remembered.setdefault("acceptance", Acceptance()).note(draft.confidence, agreed)
        new = written[: min(agreed + 1, limit - known)]
        sample.final = known + agreed
        guess = written[len(new.ids) : agreed + 1]
        following = drafted[agreed] if agreed < len(drafted) else NONE
        shown = _branches(drafted, agreed)
        event = _event(batch, scheduled, draft, written, unmasked=len(new.ids), branches=shown)
        self._write(batch, sample, new)
        sample.draft = _up_to_stop(guess + following, batch.decoding.stop_ids)
        return Outcome(len(new.ids), event, drafted=len(draft.ids))

    def _write(self, batch: BatchContext, sample: Sample, new: Tokens) -> None:
        """Puts verified tokens into the block, and those that do not fit into the next ones."""
        while len(new.ids) and not sample.is_finished:
            if not sample.block.masked:
                sample.context += sample.block.tokens.tolist()
                sample.block = fresh_block(batch, sample.request, len(sample.context), ())
            block = sample.block
            known = block.known
            fitting = min(len(new.ids), block.size - known)
            block.confidence[known : known + fitting] = new.confidence[:fitting]
            sample.confidences.update(enumerate(new.confidence[:fitting].tolist(), block.start + known))
            block.unmask(positions_between(known, known + fitting), new.ids[:fitting])
            self.end_if_over(batch, sample, new=fitting)
            new = new[fitting:]


def _costs(batch: BatchContext) -> Costs:
    """A masked copy verifies where positions predict their own token. Where only masks do, a branch's first one stands
    for the token that the verification writes.
    """
    prediction = batch.decoding.prediction
    return Costs(1 if prediction.opens_blocks else 2, 1 if prediction.opens_blocks and not prediction.shift else 0)


def _split(made: Tokens, branches: list[int], *, is_mixed: bool) -> tuple[Tokens, list[Tokens]]:
    """What a round wrote, and what its branches drafted. `is_mixed`: each branch lies behind the copy that it is of."""
    counts = np.array(branches)
    copies = len(made.ids) - int(counts.sum())  # the last number has none where the text would be over
    before = counts.cumsum() - counts
    starts = before + (np.arange(1, len(counts) + 1) if is_mixed else copies)
    written = made[(starts - 1)[:copies]] if is_mixed else made[:copies]
    return written, [made[start : start + count] for start, count in zip(starts.tolist(), branches, strict=True)]


def _up_to_stop(drafted: Tokens, stop_ids: Collection[int]) -> Tokens:
    """The drafted tokens up to the first that ends the text: those after it would be verified for nobody."""
    ids = drafted.ids.tolist()
    stop = next((index for index, token in enumerate(ids) if token in stop_ids), len(ids))
    return drafted[: stop + 1]


def _agreed(drafted: NDArray[np.int64], written: NDArray[np.int64]) -> int:
    """How many drafted tokens are what is written, up to the first that differs."""
    count = min(len(drafted), len(written))
    differing = np.flatnonzero(drafted[:count] != written[:count])
    return int(differing[0]) if len(differing) else count


def _branches(drafted: list[Tokens], accepted: int) -> tuple[Branch, ...]:
    """What each branch drafted, for people."""
    return tuple(
        Branch(number, tuple(each.ids.tolist()), number == accepted)
        for number, each in enumerate(drafted)
        if len(each.ids)
    )


def _event(
    batch: BatchContext,
    scheduled: ScheduledStep,
    draft: Tokens,
    predicted: Tokens,
    *,
    unmasked: int = 0,
    branches: tuple[Branch, ...] = (),
) -> StepEvent | None:
    """The event for `on_step`: the known tokens that run, the draft, and the position whose token comes after it."""
    if batch.on_step is None:
        return None
    sample, start = scheduled.sample, scheduled.step.start
    assert isinstance(sample, DraftedSample)
    text = sample.tokens(start, sample.known)
    first = len(text)
    size = first + max(len(predicted.ids), len(draft.ids) + 1)
    tokens = np.full(size, batch.decoding.mask_id)
    tokens[:first], tokens[first : first + len(draft.ids)] = text, draft.ids
    proposed, confidence = np.full(size, batch.decoding.mask_id), np.full(size, np.nan)
    proposed[first : first + len(predicted.ids)] = predicted.ids
    confidence[first : first + len(predicted.ids)] = predicted.confidence
    masked, written = positions_between(first, size), positions_between(first, first + unmasked)
    before = (masked, NO_POSITIONS, tokens, masked)
    return StepEvent(sample, scheduled.plan, start, *before, proposed, confidence, written, scheduled.plan, branches)
