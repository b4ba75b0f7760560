"""A sample while it is decoded. All of this is on the host; tensors are in the caches."""

import hashlib
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.plan import LayerRun, StepPlan
from stepsaver.engine.positions import (
    NO_POSITIONS,
    Positions,
    first_position,
    position_index,
    position_list,
    position_set,
    positions_between,
)
from stepsaver.engine.sampling import Proposals
from stepsaver.engine.trace import SampleStep

Finish = Literal["stop", "length"]
NEVER = -1  # the stamp of a position that has not been computed in this block yet


class Writer:
    """Chooses the tokens of unmasked positions. Generation writes what is proposed; scoring has its own writer."""

    shares_contexts: ClassVar[bool] = False  # with other requests that have the same context
    has_targets: ClassVar[bool] = False  # whether there are tokens to score
    last: int | None = None  # positions from this position on stay masked; None: blocks are decoded to their end

    def targets(self, position: int) -> tuple[int, ...]:
        """The tokens to score at a position."""
        return ()

    def write(self, position: int, proposed: int, scores: NDArray[np.float64]) -> int:
        """The token for a position, given what the model proposes and how likely the targets are."""
        return proposed


@dataclass(frozen=True)
class Request:
    """What a caller asks for: a prompt of at least one token, how many new ones, and the writer."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    key: bytes
    writer: Writer = field(default_factory=Writer)

    @property
    def end(self) -> int:
        """The first position after the last one that may be generated."""
        return len(self.prompt) + self.max_new_tokens


def request_key(prompt: tuple[int, ...], identity: str | None, number: int = 0) -> bytes:
    """What a sample's random numbers depend on: its identity if it has one, else its prompt, and its number among the
    samples of the same prompt. Never its batch.
    """
    text = f"id:{identity}" if identity is not None else "prompt:" + ",".join(map(str, prompt))
    text += f" number:{number}" if number else ""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class Ending(NamedTuple):
    finish: Finish
    position: int  # the first position after the text


class Stamps(NamedTuple):
    """Per sublayer, layer and position, the token that it had when the sublayer was last computed."""

    sublayers: NDArray[np.int64]  # attention, keys and values, MLP

    @property
    def attention(self) -> NDArray[np.int64]:
        return self.sublayers[0]

    @property
    def keys_values(self) -> NDArray[np.int64]:
        return self.sublayers[1]

    @property
    def mlp(self) -> NDArray[np.int64]:
        return self.sublayers[2]


class PositionHistory(NamedTuple):
    """Per position: the step of the block in which it was last run (-1: never), and how it drifted."""

    last_run: NDArray[np.int64]
    drift: NDArray[np.float64]  # in the probe layers, when it was last recomputed unchanged; negative: not measured
    drift_since_run: NDArray[np.float64]  # sum of drifts since all its layers last ran


class Ages(NamedTuple):
    """Per sublayer, layer and position, for how many steps without a break the delta has been reused."""

    sublayers: NDArray[np.int64]  # attention, MLP

    @property
    def attention(self) -> NDArray[np.int64]:
        return self.sublayers[0]

    @property
    def mlp(self) -> NDArray[np.int64]:
        return self.sublayers[1]


class LayerHistory(NamedTuple):
    """Which tokens each layer's caches were computed with. Kept if deltas are reused or steps are checked."""

    stamps: Stamps
    ages: Ages

    def changed(self, tokens: NDArray[np.int64]) -> Positions:
        """Positions whose token differs from the one their keys and values were computed with, in any layer."""
        return position_set((self.stamps.keys_values != tokens).any(axis=0))

    def stamp(self, run: LayerRun, tokens: NDArray[np.int64]) -> None:
        """Notes the tokens that some layers computed their positions with."""
        layers, positions = slice(run.first, run.last), run.positions
        if (
            positions.attention == positions.keys_values == positions.mlp
        ):  # true for most runs: one write instead of three
            index = position_index(positions.mlp)
            self.stamps.sublayers[:, layers, index] = tokens[index]
            return
        for stamps, ran in zip(self.stamps.sublayers, positions, strict=True):
            index = position_index(ran)
            stamps[layers, index] = tokens[index]

    def age(self, run: LayerRun, carried: Positions) -> None:
        """Ages the reused deltas of the positions that go on, and resets the age of those that ran."""
        layers = slice(run.first, run.last)
        if run.positions.attention == run.positions.mlp == carried:
            self.ages.sublayers[:, layers, position_index(carried)] = 0
            return
        for ages, ran in zip(self.ages.sublayers, (run.positions.attention, run.positions.mlp), strict=True):
            ages[layers, position_index(carried & ~ran)] += 1
            ages[layers, position_index(ran)] = 0


class Unmasking(NamedTuple):
    step: int  # of the block
    positions: Positions


@dataclass
class BlockState:
    """The block being decoded: its tokens, which positions are still masked, and what its caches were computed with."""

    start: int  # the first position in the text
    tokens: NDArray[np.int64]
    masked: Positions
    never_unmasked: Positions  # masked positions that will never be unmasked: those after a continuation that is scored
    changed: Positions  # positions whose token differs from the one of their keys and values, in any layer

    by_layer: LayerHistory | None  # None: not needed, and all layers rewrite the keys and values of the same positions
    proposed: NDArray[np.int64]  # per position, the last token proposed for it
    confidence: NDArray[np.float64]  # and how sure the model was; NaN if no step has computed it
    history: PositionHistory
    steps: int = 0  # denoising steps so far, full, sub and reused
    steps_in_sub_block: int = 0
    unmaskings: list[Unmasking] = field(default_factory=list)  # by step, ascending
    target_scores: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # of positions with targets
    opening: int | None = None  # the token that the next block would open with, by the last step
    drift_since_full: float = 0.0  # the mean drift of recomputed positions, summed since the last full step

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def known(self) -> int:
        """How many positions there are before the first masked one."""
        return first_position(self.masked) if self.masked else self.size

    def note(self, positions: Positions, proposed: Proposals) -> None:
        """Stores what a step proposed for some positions."""
        own = positions & positions_between(0, self.size)
        index = position_index(own)
        count = len(index)
        self.proposed[index] = proposed.tokens[:count]
        self.confidence[index] = proposed.confidence[:count]
        self.target_scores.update(zip(position_list(own), proposed.target_scores[:count], strict=True))
        if count < len(proposed.tokens):  # the position after the last one
            self.opening = int(proposed.tokens[count])

    def noted(self, position: int) -> tuple[int, NDArray[np.float64]]:
        """The token last proposed for a position, and the scores of its targets."""
        return int(self.proposed[position]), self.target_scores[position]

    def unmask(self, positions: Positions, tokens: NDArray[np.int64]) -> None:
        assert positions & ~self.masked == NO_POSITIONS, "a position is unmasked once"
        index = position_index(positions)
        assert not np.isnan(self.confidence[index]).any(), (
            "a position is unmasked from logits that a step computed for it"
        )
        differing = index[self.tokens[index] != tokens]  # a scored text may contain the mask token itself
        self.changed |= (
            positions if len(differing) == len(index) else sum(1 << position for position in differing.tolist())
        )
        self.tokens[index] = tokens
        self.unmaskings.append(Unmasking(self.steps, positions))
        self.masked &= ~positions

    def count_step(self, *, is_last_of_sub_block: bool) -> None:
        self.steps += 1
        self.steps_in_sub_block = 0 if is_last_of_sub_block else self.steps_in_sub_block + 1

    def record_drift(self, plan: StepPlan, drift: NDArray[np.float64]) -> None:
        """Notes the drift of the window's positions in the probe layers. It only means something for unchanged
        positions.
        """
        assert self.by_layer is not None, "a drift is measured against deltas that are kept"
        window = position_index(plan.window)
        unchanged = (self.by_layer.stamps.keys_values[0, window] == self.tokens[window]) & np.isfinite(drift)
        history = self.history
        history.drift[window] = np.where(unchanged, drift, -1.0)
        history.drift_since_run[window] += np.where(unchanged, drift, 0.0)
        if unchanged.any():
            self.drift_since_full += float(drift[unchanged].mean())

    def record_run(self, plan: StepPlan) -> None:
        """Notes what a plan computed and, if there is a history by layer, what each layer computed and reused."""
        history = self.history
        history.last_run[position_index(plan.window)] = self.steps
        if plan.kind == "full":
            self.drift_since_full = 0.0
        if self.by_layer is None:
            assert plan.rewrites_alike, f"layers rewrite different positions and nobody notes which: {plan}"
            self.changed &= ~plan.rewritten
            return
        history.drift_since_run[position_index(plan.run_everywhere)] = 0.0
        for run in plan.runs:
            self.by_layer.stamp(run, self.tokens)
            self.by_layer.age(run, plan.carried(run.last - 1))
        self.changed = self.changed & ~plan.rewritten if plan.rewrites_alike else self.by_layer.changed(self.tokens)


def new_block(
    start: int, given: tuple[int, ...], *, decoding: DecodingSettings, layers: int | None, last: int | None = None
) -> BlockState:
    """A block that opens with given tokens. The rest is masked, and stays masked from position `last` on.

    `layers` is the number of layers to keep a history of; None: no history.
    """
    size = decoding.block_size
    tokens = np.full(size, decoding.mask_id, dtype=np.int64)
    tokens[: len(given)] = given
    masked = positions_between(len(given), size)
    return BlockState(
        start=start,
        tokens=tokens,
        masked=masked,
        never_unmasked=NO_POSITIONS if last is None else masked & ~positions_between(0, max(0, last - start)),
        changed=positions_between(0, size),
        by_layer=None if layers is None else _new_history(layers, size),
        proposed=np.full(size, decoding.mask_id, dtype=np.int64),
        confidence=np.full(size, np.nan),
        history=PositionHistory(
            last_run=np.full(size, -1, dtype=np.int64),
            drift=np.full(size, -1.0),
            drift_since_run=np.zeros(size),
        ),
    )


def _new_history(layers: int, size: int) -> LayerHistory:
    stamps = np.full((3, layers, size), NEVER, dtype=np.int64)
    return LayerHistory(Stamps(stamps), Ages(np.zeros((2, layers, size), dtype=np.int64)))


@dataclass
class Sample:
    """A request while it is in the batch."""

    index: int
    request: Request
    slot: int
    context: list[int]  # the tokens before the current block: whole blocks, in the prefix cache
    block: BlockState
    ending: Ending | None = None
    steps: list[SampleStep] = field(default_factory=list)  # what was executed for the sample, in order
    stamps: NDArray[np.int64] | None = None  # per position, the token its keys were computed with; only if checked
    confidences: dict[int, float] = field(default_factory=dict)  # by position: how sure the model was of its token

    @property
    def is_finished(self) -> bool:
        return self.ending is not None

    @property
    def generated(self) -> list[int]:
        """The generated tokens that cannot change any more, including the stop token."""
        tokens = self.context + self.block.tokens[: self.block.known].tolist()
        stop = self.request.end if self.ending is None else self.ending.position
        return tokens[len(self.request.prompt) : stop]


def ending_of(sample: Sample, stop_ids: tuple[int, ...]) -> Ending | None:
    """Where and why the sample ends, if it does. What comes after a stop token or the limit does not matter."""
    block = sample.block
    first_generated = max(0, len(sample.request.prompt) - block.start)
    limit = sample.request.end - block.start
    known = block.known
    for position, token in enumerate(block.tokens[first_generated : min(known, limit)].tolist(), first_generated):
        if token in stop_ids:
            return Ending("stop", block.start + position + 1)
    return Ending("length", sample.request.end) if known >= limit else None
