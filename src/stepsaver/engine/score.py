"""Log-likelihoods: by the decode loop, or by one forward.

By the loop, a request becomes a sample with its own writer: the policy chooses positions as in generation, but the
given tokens are written. Requests with the same context and a continuation of one token become one sample with several
targets. By one forward there is no second step, so no rule can act; requests that show the same positions and score the
same ones, such as a question's one-token choices, share it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Layout, Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.positions import Positions, position_index, positions_between
from stepsaver.engine.sampling import Sampling, propose
from stepsaver.engine.state import Request, Sample, Writer, request_key
from stepsaver.engine.trace import DENOISING


@dataclass(frozen=True)
class ScoreRequest:
    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """`is_greedy`: every token is the one that the model would have written. `steps` counts denoising steps."""

    index: int
    loglikelihood: float
    is_greedy: bool
    steps: int


class TargetScores(NamedTuple):
    """How likely each target of a position was when it was written, and what the model would have written."""

    log_probabilities: NDArray[np.float64]
    proposed: int


class GivenText(Writer):
    """Writes given tokens whatever the model proposes, and notes how likely they were."""

    shares_contexts = True
    has_targets = True

    def __init__(self, start: int, targets: tuple[tuple[int, ...], ...]) -> None:
        self.positions = range(start, start + len(targets))
        self.last = self.positions.stop
        self.by_position = targets  # per position, the tokens to score; the first one is written
        self.scores: dict[int, TargetScores] = {}

    def targets(self, position: int) -> tuple[int, ...]:
        return self.by_position[position - self.positions.start] if position in self.positions else ()

    def write(self, position: int, proposed: int, scores: NDArray[np.float64]) -> int:
        if position not in self.positions:  # it opens a block that will not be decoded
            return proposed
        self.scores[position] = TargetScores(scores, proposed)
        return self.targets(position)[0]


class ScoredRequest(NamedTuple):
    """A sample of the loop, and the requests it answers: one for each target of a single position, or just one."""

    request: Request
    writer: GivenText
    answers: tuple[int, ...]


def merge_requests(requests: Sequence[ScoreRequest]) -> list[ScoredRequest]:
    """One sample per request, except that one-token requests with the same context share a sample."""
    single: dict[tuple[int, ...], list[int]] = defaultdict(list)
    merged: list[ScoredRequest] = []
    for index, (context, continuation) in enumerate((each.context_ids, each.continuation_ids) for each in requests):
        if len(continuation) == 1:
            single[context].append(index)
        else:
            merged.append(_scored(context, tuple((token,) for token in continuation), (index,)))
    for context, indices in single.items():
        tokens = tuple(requests[index].continuation_ids[0] for index in indices)
        merged.append(_scored(context, (tokens,), tuple(indices)))
    # samples with the same context are neighbours, so that they join the batch together and share a prefill
    return sorted(merged, key=lambda each: (len(each.request.prompt), each.request.prompt), reverse=True)


def _scored(context: tuple[int, ...], targets: tuple[tuple[int, ...], ...], answers: tuple[int, ...]) -> ScoredRequest:
    writer = GivenText(len(context), targets)
    return ScoredRequest(Request(context, len(targets), request_key(context, None), writer), writer, answers)


def scores_of(scored: ScoredRequest, sample: Sample) -> Iterator[Score]:
    """The scores of all requests that a finished sample answers."""
    writer, answers = scored.writer, scored.answers
    steps = sum(step.kind in DENOISING for step in sample.steps)
    found = [writer.scores[position] for position in writer.positions]
    if len(found) == 1:
        (only,), (tokens,) = found, writer.by_position
        for log_probability, token, index in zip(only.log_probabilities, tokens, answers, strict=True):
            yield Score(index, float(log_probability), only.proposed == token, steps)
        return
    total = float(sum(each.log_probabilities[0] for each in found))
    is_greedy = all(each.proposed == tokens[0] for each, tokens in zip(found, writer.by_position, strict=True))
    yield Score(answers[0], total, is_greedy, steps)


class Shown(NamedTuple):
    """What a request shows to the model, and the positions whose tokens are scored."""

    tokens: tuple[int, ...]
    scored: Positions
    block_size: int


class Asked(NamedTuple):
    shown: Shown
    targets: tuple[int, ...]  # one for each position that is scored


class ScoringForward(NamedTuple):
    """What is run once, and the tokens to score for each request it answers, by the request's index."""

    shown: Shown
    targets: dict[int, tuple[int, ...]]


Prepare = Callable[[ScoreRequest, DecodingSettings], Asked]


def reference(request: ScoreRequest, decoding: DecodingSettings) -> Asked:
    """The reference's estimator: the first target token masked, the others and a stop token shown.

    Only the first token is scored.
    """
    if decoding.prediction.has_causal_context:
        raise UsageError("the reference estimator shows what follows the first token, and here the context is causal")
    if not decoding.stop_ids:
        raise UsageError("the reference estimator shows a stop token, and this model has none; set the stop id")
    length = len(request.context_ids)
    shown = [*request.context_ids, decoding.mask_id, *request.continuation_ids[1:], decoding.stop_ids[0]]
    positions = (len(shown) + decoding.block_size - 1) // decoding.block_size * decoding.block_size
    shown += [decoding.mask_id] * (positions - len(shown))
    scored = positions_between(length, length + 1)
    return Asked(Shown(tuple(shown), scored, decoding.block_size), request.continuation_ids[:1])


def autoregressive(request: ScoreRequest, decoding: DecodingSettings) -> Asked:
    """Scores all tokens of the continuation by causal positions: how likely autoregressive decoding writes it."""
    shown = (*request.context_ids, *request.continuation_ids)
    scored = positions_between(len(request.context_ids), len(shown))
    return Asked(Shown(shown[:-1], scored, 1), request.continuation_ids)


IN_ONE_FORWARD: dict[Estimator, Prepare] = {"reference": reference, "autoregressive": autoregressive}


def forwards_of(requests: Sequence[ScoreRequest], prepare: Prepare, decoding: DecodingSettings) -> list[ScoringForward]:
    """The forwards to run, without duplicates, in the order of the requests."""
    found: dict[Shown, ScoringForward] = {}
    for index, request in enumerate(requests):
        shown, targets = prepare(request, decoding)
        found.setdefault(shown, ScoringForward(shown, {})).targets[index] = targets
    return list(found.values())


def steps_of(forwards: Sequence[ScoringForward], decoding: DecodingSettings, layers: int) -> list[Step]:
    """One step per forward, each in its own slot."""
    steps = []
    for slot, (shown, _) in enumerate(forwards):
        if shown.block_size == 1 and not decoding.prediction.opens_blocks:
            steps.append(_with_copies(slot, shown, decoding, layers))
            continue
        plan = whole_plan(
            "prefill",
            window=positions_between(0, len(shown.tokens)),
            reads=decoding.prediction.of_context.readers(shown.scored),
            layers=layers,
            prediction=decoding.prediction.of_context,
        )
        steps.append(Step(slot, 0, np.array(shown.tokens), shown.block_size, plan))
    return steps


def _with_copies(slot: int, shown: Shown, decoding: DecodingSettings, layers: int) -> Step:
    """Causal positions, and a masked copy of each that is scored, which sees only what lies before it."""
    count, scored = len(shown.tokens), position_index(shown.scored)
    copies = np.arange(count, count + len(scored))
    positions, places = np.concatenate((np.arange(count), scored)), np.arange(count + len(scored))
    views = np.zeros((len(places), 3), dtype=np.int64)
    views[:, 0] = places + 1
    views[count:, 1:] = np.stack((scored, copies), 1)
    plan = whole_plan(
        "prefill",
        window=positions_between(0, len(places)),
        reads=positions_between(count, len(places)),
        layers=layers,
        prediction=decoding.prediction,
    )
    tokens = np.concatenate((np.array(shown.tokens), np.full(len(copies), decoding.mask_id)))
    layout = Layout(positions, places, views, np.where(places < count, -1, positions), positions)
    return Step(slot, 0, tokens, 1, plan, layout)


def run_once(
    model: Transformer, memory: Memory, steps: Sequence[Step], forwards: Sequence[ScoringForward], mask_id: int
) -> Iterator[Score]:
    """The score of every request that the forwards answer."""
    targets = [position for each in forwards for position in zip(*each.targets.values(), strict=True)]
    proposals = propose(run_step(model, memory, steps).logits, mask_id=mask_id, sampling=Sampling(), targets=targets)
    first = 0
    for each in forwards:
        last = first + each.shown.scored.bit_count()
        scores = np.stack(proposals.target_scores[first:last]).sum(0)
        is_best = (proposals.tokens[first:last, None] == np.array(targets[first:last])).all(0)
        for index, own, best in zip(each.targets, scores, is_best, strict=True):
            yield Score(index, float(own), bool(best), 1)
        first = last
