"""Where the positions of a round of speculative decoding go, and how many pay."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RATE = 0.8  # how likely a position of a branch is right if the one before it is, before anything is known of it
START = 0.9  # share of drafted tokens that are right, before there are any
WORTHLESS = 0.02  # nobody computes a position that promises less
LEVELS = WORTHLESS ** np.linspace(0, 1, 64)  # of promise, descending
EDGES = np.array([0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99])  # of the bins of confidence
PRIOR = 8.0  # so many drafted tokens does a model's own confidence count for
MOST = 128  # positions of a sample's forward, where nobody says how many
BUDGETS = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, MOST)
PLANNING = 1.5e-4  # seconds of the host for a round with branches, of each sample: on two CPU cores of 2026
ROUNDS = 16  # of a draft that grows from nothing, to say what a budget is worth


class Budget(NamedTuple):
    """How many positions a sample's forward may have (0: one forward drafts, the next verifies), and a branch."""

    positions: int
    span: int


class Costs(NamedTuple):
    """The positions that verify a token, and those of a branch that draft nothing."""

    token: int = 1
    branch: int = 0


class Acceptance:
    """How often a sample's drafted tokens were right, by the confidence that they were drafted with."""

    def __init__(self) -> None:
        self.right = np.zeros(len(EDGES) + 1)
        self.tried = np.zeros(len(EDGES) + 1)

    def chances(self, confidence: NDArray[np.float64]) -> NDArray[np.float64]:
        bins = np.searchsorted(EDGES, confidence, side="right")
        return (self.right[bins] + PRIOR * confidence) / (self.tried[bins] + PRIOR)

    def note(self, confidence: NDArray[np.float64], accepted: int) -> None:
        """The first `accepted` of some drafted tokens were right, and the one after them was not."""
        bins = np.searchsorted(EDGES, confidence[: accepted + 1], side="right")
        np.add.at(self.tried, bins, 1)
        np.add.at(self.right, bins[:accepted], 1)

    @property
    def mean(self) -> float:
        """The share of all tokens that were right; before there are any, `START`."""
        return float((self.right.sum() + START * PRIOR) / (self.tried.sum() + PRIOR))


def allocate(chances: NDArray[np.float64], positions: int, caps: Sequence[int], costs: Costs) -> tuple[int, list[int]]:
    """How many drafted tokens to verify, and how many positions the branch of each number of accepted tokens has.

    A drafted token promises the chance that it and all before it are right; a position of a branch the chance that
    exactly the branch's number is accepted, times RATE for itself and each position before it. All that promise more
    than a level are computed, the lowest level that `positions` are enough for.
    """
    reached = np.concatenate(([1.0], chances.cumprod()))
    verified = (reached[None, 1:] >= LEVELS[:, None]).sum(1)  # of each level
    numbers = np.arange(len(reached))
    exactly = reached - np.append(reached[1:], 0.0)
    is_last = numbers == verified[:, None]
    promise = np.where(is_last, reached, np.where(numbers < verified[:, None], exactly, 0.0))
    with np.errstate(divide="ignore"):
        lengths = np.floor(np.log(LEVELS[:, None] / promise) / np.log(RATE) + 1e-9)
    masks = np.clip(lengths, 0, caps).astype(np.int64)
    taken = verified * costs.token + masks.sum(1) + costs.branch * (masks > 0).sum(1)
    fitting = np.flatnonzero(costs.token + taken <= positions)
    if not len(fitting):
        return 0, [0]
    best = fitting[-1]
    return int(verified[best]), masks[best, : verified[best] + 1].tolist()


class Expected(NamedTuple):
    """What forwards of a budget give: tokens in the mean, and the share of the forwards that has so many positions."""

    tokens: float
    forwards: tuple[tuple[int, float], ...]


@lru_cache(maxsize=4096)
def expected(chance: float, budget: Budget, costs: Costs) -> Expected:
    """Of drafts whose tokens are all right with the same chance, over rounds that begin without a draft."""
    if not budget.positions:
        tokens = sum(chance**count for count in range(budget.span + 1))
        return Expected(tokens / 2, ((budget.span, 0.5), (1 + budget.span * costs.token, 0.5)))
    drafts: dict[int, float] = {0: 1.0}
    tokens, forwards = 0.0, defaultdict[int, float](float)
    for _ in range(ROUNDS):
        following = defaultdict[int, float](float)
        for length, share in drafts.items():
            caps = [budget.span] * (length + 1)
            verified, masks = allocate(np.full(length, chance), budget.positions, caps, costs)
            branches = sum(masks) + costs.branch * sum(map(bool, masks))
            forwards[costs.token * (1 + verified) + branches] += share / ROUNDS
            for accepted, branch in enumerate(masks):
                exactly = chance**accepted * (1 - chance if accepted < verified else 1)
                tokens += share * exactly * (accepted + 1)
                following[branch] += share * exactly
        drafts = following
    return Expected(tokens / ROUNDS, tuple(forwards.items()))


def best_budget(
    chance: float, span: int, costs: Costs, seconds: Callable[[float], float], planning: float = 0.0
) -> Budget:
    """The budget that gives the most tokens a second. `seconds` are those of a forward of so many positions each,
    `planning` those of the host that a forward with branches takes on top.
    """
    spans = sorted({min(span, each) for each in (2, 4, 6, 8, 12, 16, 24, span)})
    choices = [Budget(0, each) for each in spans] + [Budget(positions, span) for positions in BUDGETS]

    def rate(budget: Budget) -> float:
        found = expected(chance, budget, costs)
        forward = sum(share * seconds(positions) for positions, share in found.forwards)
        return found.tokens / (forward + (planning if budget.positions else 0.0))

    return max(choices, key=rate)
