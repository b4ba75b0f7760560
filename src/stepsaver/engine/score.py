"""Log-likelihoods by the decode loop: the policy chooses rows as in generation, but the given tokens are written.

A request becomes a sample of the loop in `generate.py`, with its own writer. Requests with the same context and a
continuation of one token become one sample with several targets.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
