"""Log-likelihoods by the decode loop: the policy chooses rows as in generation, the given tokens are put there.

A request becomes one or several samples of the loop in `generate.py`; requests whose continuation is one token and that
share a context become one sample with several options.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from stepsaver.engine.decoding import Decoding
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.rows import rows_between
from stepsaver.engine.sampling import Sampling, propose
from stepsaver.engine.state import Request, Sample, request_key

Estimator = Literal["trajectory", "reference"]
ESTIMATORS: tuple[Estimator, ...] = ("trajectory", "reference")


@dataclass(frozen=True)
class ScoreRequest:
    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


@dataclass(frozen=True)
class Score:
    """`is_greedy`: every token was what the model would have put there. `steps` counts denoising steps."""

    index: int
    loglikelihood: float
    is_greedy: bool
    steps: int


class ScoredRequest(NamedTuple):
    """A sample of the loop, and the requests that it answers: option j of a single position, or all positions."""

    request: Request
    answers: tuple[int, ...]


def merge_requests(requests: Sequence[ScoreRequest]) -> list[ScoredRequest]:
    """One sample per request, but one for all requests with the same context and a continuation of one token."""
    single: dict[tuple[int, ...], list[int]] = defaultdict(list)
    merged: list[ScoredRequest] = []
    for index, (context, continuation) in enumerate((each.context_ids, each.continuation_ids) for each in requests):
        if len(continuation) == 1:
            single[context].append(index)
        else:
            merged.append(ScoredRequest(_request(context, tuple((token,) for token in continuation)), (index,)))
    for context, indices in single.items():
        tokens = tuple(requests[index].continuation_ids[0] for index in indices)
        merged.append(ScoredRequest(_request(context, (tokens,)), tuple(indices)))
    # samples with the same context stand together, so that they join the batch together and share its prefill
    return sorted(merged, key=lambda each: (len(each.request.prompt), each.request.prompt), reverse=True)


def _request(context: tuple[int, ...], options: tuple[tuple[int, ...], ...]) -> Request:
    return Request(context, len(options), request_key(context, None), options)


def scores_of(sample: Sample, answers: tuple[int, ...]) -> Iterator[Score]:
    """The scores of all requests that a finished sample answers."""
    options = sample.request.options
    assert options is not None
    steps = sum(step.kind in ("full", "sub", "reused") for step in sample.steps)
    found = [sample.scores[len(sample.request.prompt) + place] for place in range(len(options))]
    if len(options) == 1:
        for place, index in enumerate(answers):
            is_greedy = found[0].proposed == options[0][place]
            yield Score(index, float(found[0].log_probabilities[place]), is_greedy, steps)
        return
    total = float(sum(each.log_probabilities[0] for each in found))
    is_greedy = all(each.proposed == tokens[0] for each, tokens in zip(found, options, strict=True))
    yield Score(answers[0], total, is_greedy, steps)


def reference_step(request: ScoreRequest, slot: int, decoding: Decoding, layers: int) -> Step:
    """The reference's estimator as one forward: the first target token masked, the others and a stop token shown."""
    length = len(request.context_ids)
    shown = [*request.context_ids, decoding.mask_id, *request.continuation_ids[1:], decoding.stop_ids[0]]
    rows = (len(shown) + decoding.block_size - 1) // decoding.block_size * decoding.block_size
    tokens = np.array(shown + [decoding.mask_id] * (rows - len(shown)), dtype=np.int64)
    plan = whole_plan("prefill", window=rows_between(0, rows), reads=rows_between(length - 1, length), layers=layers)
    return Step(slot, 0, tokens, decoding.block_size, plan)


def run_reference(
    model: Transformer, memory: Memory, requests: Sequence[ScoreRequest], steps: Sequence[Step], mask_id: int
) -> list[tuple[float, bool]]:
    """Log-likelihood of each request's first target token, and whether it was the arg-max."""
    logits = run_step(model, memory, steps).logits
    options = [request.continuation_ids[:1] for request in requests]
    proposals = propose(logits, mask_id=mask_id, sampling=Sampling(), options=options)
    return [
        (float(scores[0]), bool(token == request.continuation_ids[0]))
        for scores, token, request in zip(proposals.option_scores, proposals.tokens, requests, strict=True)
    ]
