"""Log-likelihoods by one forward: there is no second step, so no rule can act.

Requests that show the same rows and score the same ones, such as a question's one-token choices, share a forward.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.errors import UsageError
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.rows import Rows, rows_between
from stepsaver.engine.sampling import Sampling, propose
from stepsaver.engine.score import Score, ScoreRequest


class Shown(NamedTuple):
    """What a request shows to the model, and the rows whose tokens are scored."""

    tokens: tuple[int, ...]
    scored: Rows
    block_size: int


class Asked(NamedTuple):
    shown: Shown
    targets: tuple[int, ...]  # one for each row that is scored


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
    rows = (len(shown) + decoding.block_size - 1) // decoding.block_size * decoding.block_size
    shown += [decoding.mask_id] * (rows - len(shown))
    scored = rows_between(length, length + 1)
    return Asked(Shown(tuple(shown), scored, decoding.block_size), request.continuation_ids[:1])


def autoregressive(request: ScoreRequest, decoding: DecodingSettings) -> Asked:
    """Scores all tokens of the continuation by causal rows: how likely autoregressive decoding writes it."""
    if not decoding.prediction.opens_blocks:
        raise UsageError("the autoregressive estimator needs rows that predict the token after them")
    shown = (*request.context_ids, *request.continuation_ids)
    scored = rows_between(len(request.context_ids), len(shown))
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
        plan = whole_plan(
            "prefill",
            window=rows_between(0, len(shown.tokens)),
            reads=decoding.prediction.of_context.readers(shown.scored),
            layers=layers,
            prediction=decoding.prediction.of_context,
        )
        steps.append(Step(slot, 0, np.array(shown.tokens), shown.block_size, plan))
    return steps


def run_once(
    model: Transformer, memory: Memory, steps: Sequence[Step], forwards: Sequence[ScoringForward], mask_id: int
) -> Iterator[Score]:
    """The score of every request that the forwards answer."""
    targets = [row for each in forwards for row in zip(*each.targets.values(), strict=True)]
    proposals = propose(run_step(model, memory, steps).logits, mask_id=mask_id, sampling=Sampling(), targets=targets)
    first = 0
    for each in forwards:
        last = first + each.shown.scored.bit_count()
        scores = np.stack(proposals.target_scores[first:last]).sum(0)
        is_best = (proposals.tokens[first:last, None] == np.array(targets[first:last])).all(0)
        for index, own, best in zip(each.targets, scores, is_best, strict=True):
            yield Score(index, float(own), bool(best), 1)
        first = last
