"""Log-likelihoods by one forward per request: no step follows another, so no rule can act on them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stepsaver.engine.decoding_settings import DecodingSettings
from stepsaver.engine.errors import UsageError
from stepsaver.engine.estimators import Estimator
from stepsaver.engine.forward import Memory, run_step
from stepsaver.engine.models.transformer import Transformer
from stepsaver.engine.packing import Step
from stepsaver.engine.plan import whole_plan
from stepsaver.engine.rows import Rows, rows_between
from stepsaver.engine.sampling import Sampling, propose
from stepsaver.engine.score import ScoreRequest


class ScoringForward(NamedTuple):
    """A sample's forward, and the tokens that its reads are scored for."""

    step: Step
    targets: tuple[int, ...]


Prepare = Callable[[ScoreRequest, int, DecodingSettings, int], ScoringForward]


def reference(request: ScoreRequest, slot: int, decoding: DecodingSettings, layers: int) -> ScoringForward:
    """The reference's estimator: the first target token masked, the others and a stop token shown.

    Only the first token is scored.
    """
    if not decoding.stop_ids:
        raise UsageError("the reference estimator shows a stop token, and this model has none; set the stop id")
    length = len(request.context_ids)
    shown = [*request.context_ids, decoding.mask_id, *request.continuation_ids[1:], decoding.stop_ids[0]]
    rows = (len(shown) + decoding.block_size - 1) // decoding.block_size * decoding.block_size
    shown += [decoding.mask_id] * (rows - len(shown))
    step = _step(slot, shown, rows_between(length, length + 1), decoding, layers, block_size=decoding.block_size)
    return ScoringForward(step, request.continuation_ids[:1])


def autoregressive(request: ScoreRequest, slot: int, decoding: DecodingSettings, layers: int) -> ScoringForward:
    """All tokens of the continuation by causal rows: how likely autoregressive decoding writes it."""
    if not decoding.prediction.opens_blocks:
        raise UsageError("the autoregressive estimator needs rows that predict the token after them")
    shown = [*request.context_ids, *request.continuation_ids]
    scored = rows_between(len(request.context_ids), len(shown))
    return ScoringForward(_step(slot, shown[:-1], scored, decoding, layers, block_size=1), request.continuation_ids)


def _step(
    slot: int, shown: list[int], scored: Rows, decoding: DecodingSettings, layers: int, *, block_size: int
) -> Step:
    plan = whole_plan(
        "prefill",
        window=rows_between(0, len(shown)),
        reads=decoding.prediction.readers(scored),
        layers=layers,
        prediction=decoding.prediction,
    )
    return Step(slot, 0, np.array(shown), block_size, plan)


IN_ONE_FORWARD: dict[Estimator, Prepare] = {"reference": reference, "autoregressive": autoregressive}


def run_once(
    model: Transformer, memory: Memory, forwards: Sequence[ScoringForward], mask_id: int
) -> list[tuple[float, bool]]:
    """Each request's log-likelihood, and whether all its tokens were the most likely ones."""
    logits = run_step(model, memory, [each.step for each in forwards]).logits
    targets = [(token,) for each in forwards for token in each.targets]
    proposals = propose(logits, mask_id=mask_id, sampling=Sampling(), targets=targets)
    scores = np.concatenate(proposals.target_scores)
    is_best = proposals.tokens == np.array(targets)[:, 0]
    ends = np.cumsum([len(each.targets) for each in forwards])[:-1]
    return [
        (float(own.sum()), bool(best.all()))
        for own, best in zip(np.split(scores, ends), np.split(is_best, ends), strict=True)
    ]
