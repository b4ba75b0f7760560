"""Which reuse rules cannot act on a log-likelihood task, and why. The user is told before anything is run.

Every rule reuses what an earlier step of the same block computed. If a block never takes a second step, there is
nothing to reuse, and every config gives the same numbers to the last bit.
"""

from collections.abc import Iterable
from typing import NamedTuple

from stepsaver.engine import registry
from stepsaver.engine.defaults import Estimator
from stepsaver.engine.positions import NEXT, Prediction
from stepsaver.engine.rules.adaptive_layers import AdaptiveLayers
from stepsaver.engine.rules.layer_reuse import LayerReuse
from stepsaver.engine.rules.partial_commit import PartialCommit
from stepsaver.engine.rules.rule import Rule
from stepsaver.engine.rules.window import Window


class ScoredLengths(NamedTuple):
    """The numbers of tokens in a request's context and continuation."""

    context: int
    continuation: int


class InertRule(NamedTuple):
    rule: str
    reason: str


def inert_rules(
    rules: tuple[Rule, ...],
    requests: Iterable[ScoredLengths],
    *,
    block_size: int,
    prediction: Prediction = NEXT,
    estimator: Estimator = "trajectory",
    score_stop: bool = False,
) -> tuple[InertRule, ...]:
    """The rules that surely change nothing, each with the reason."""
    reason = no_second_step(
        requests, block_size=block_size, prediction=prediction, estimator=estimator, score_stop=score_stop
    )
    found = ((rule, reason or inert_setting(rule)) for rule in rules)
    return tuple(InertRule(registry.describe(rule), why) for rule, why in found if why)


def inert_setting(rule: Rule) -> str | None:
    """Why a rule with these settings never leaves anything out, or None."""
    match rule:
        case LayerReuse(k=1):
            return "k=1 computes every step"
        case AdaptiveLayers(threshold=0):
            return "threshold=0 calls no row calm"
        case Window(refresh="drift", limit=0):
            return "limit=0 refreshes at every full step"
        case PartialCommit(settle="all"):
            return "settle=all commits every row"
    return None


def acting_rules(rules: tuple[Rule, ...], inert: Iterable[InertRule]) -> tuple[Rule, ...]:
    """The other rules. Two configs with the same policy and the same acting rules give the same numbers."""
    names = {each.rule for each in inert}
    return tuple(rule for rule in rules if registry.describe(rule) not in names)


def no_second_step(
    requests: Iterable[ScoredLengths],
    *,
    block_size: int,
    prediction: Prediction,
    estimator: Estimator,
    score_stop: bool,
) -> str | None:
    """Why no block ever takes a second step, or None. If so, the decode policy has nothing to choose either."""
    if estimator != "trajectory":
        return f"the {estimator} estimator is one forward per request, so there is no earlier step to reuse"
    steps = (most_steps(r, block_size=block_size, prediction=prediction, score_stop=score_stop) for r in requests)
    if all(each <= 1 for each in steps):
        return "no request can take two steps in a block, so there is no earlier step to reuse"
    return None


def most_steps(
    request: ScoredLengths, *, block_size: int, prediction: Prediction = NEXT, score_stop: bool = False
) -> int:
    """The most denoising steps that any one block of a request can take.

    Every step unmasks at least one row, so this is the number of rows to unmask in the block. If the context predicts a
    block's first token, that row does not count: the prefill or the commit before the block scores it.
    """
    # an empty context becomes one token; after a causal context, blocks start right behind it
    start = 0 if prediction.has_causal_context else max(request.context, 1)
    positions = range(start, start + request.continuation + score_stop)
    if not positions:
        return 0
    blocks = range(positions[0] // block_size, positions[-1] // block_size + 1)
    shift = prediction.of_context.shift
    return max(_rows_within(positions, block * block_size + shift, (block + 1) * block_size) for block in blocks)


def _rows_within(positions: range, start: int, stop: int) -> int:
    return max(min(positions.stop, stop) - max(positions.start, start), 0)
