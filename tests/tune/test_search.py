"""What a search tries, by simulated candidates."""

import numpy as np
import pytest

from stepsaver.tune.observed import Goal
from stepsaver.tune.search import search
from tests.tune.simulated import (
    CHUNK,
    FRESH,
    SEARCH_CHUNKS,
    SimulatedSpace,
    SimulatedTrials,
    Truth,
    tuned,
    with_pairs,
)

GOAL = Goal(0.01, 0.95, FRESH)


def test_a_clear_winner_is_found() -> None:
    singles = {
        "slow and right": Truth(1.05, 0.005, 0.005),
        "fast and wrong": Truth(3.0, 0.12, 0.01),
        "fast and right": Truth(1.6, 0.01, 0.012),
        "useless": Truth(0.8, 0.01, 0.01),
    }
    found = [tuned(with_pairs(singles), GOAL, seed).confirmed for seed in range(40)]
    names = [each.name for each in found if each]
    assert len(names) >= 36
    assert sum("fast and right" in name for name in names) >= 0.9 * len(names)
    assert not any("wrong" in name for name in names)


def test_one_of_every_kind_runs_first_then_more_of_the_kinds_that_promise_most() -> None:
    turns = [f"{kind} {number}" for number in range(7) for kind in "abcdefghijklm"]
    truths = {name: Truth(2.0 if name.startswith("g") else 1.2, 0.002, 0.002) for name in turns}
    trials = SimulatedTrials(truths, np.random.default_rng(0), budget=60.0)
    search(SimulatedSpace(truths), trials, Goal(0.03, 0.95, FRESH))
    assert list(trials.counts)[:13] == turns[:13]
    assert {f"g {number}" for number in range(7)} <= trials.counts.keys()
    assert len(trials.counts) < len(turns)


class LuckyAtFirst(SimulatedTrials):
    """On the first chunk no answer differs, whatever the truth is."""

    def draw(self, truth: Truth, problems: int) -> np.ndarray:
        return np.zeros(2) if all(chunk == 0 for _, chunk in self.drawn) else super().draw(truth, problems)


def test_those_behind_race_once_those_before_them_have_fallen() -> None:
    truths = {"steady": Truth(1.3, 0.004, 0.004)} | {f"lucky {n}": Truth(2.5, 0.3, 0.0) for n in range(12)}
    for seed in range(10):
        trials = LuckyAtFirst(truths, np.random.default_rng(seed), 400.0)
        ((name, seen),) = search(SimulatedSpace(truths), trials, GOAL)
        assert name == "steady"
        assert seen.problems == SEARCH_CHUNKS * CHUNK


@pytest.mark.parametrize("budget", [30.0, 100.0, 1e6])
def test_a_search_ends_with_its_budget_or_when_all_is_known(budget: float) -> None:
    truths = with_pairs({str(place): Truth(1.1 + place / 10, 0.01, 0.01) for place in range(6)})
    trials = SimulatedTrials(truths, np.random.default_rng(0), budget)
    search(SimulatedSpace(truths), trials, GOAL)
    assert trials.budget > -8 if budget < 1e6 else min(map(trials.chunks_done, trials.counts)) == SEARCH_CHUNKS


def test_each_further_one_is_likelier_to_hold_and_none_is_slower_than_plain_decoding() -> None:
    singles = {str(place): Truth(0.9 + place / 10, 0.003 * place, 0.002) for place in range(6)}
    trials = SimulatedTrials(with_pairs(singles), np.random.default_rng(3), 200.0)
    ranked = [seen for _, seen in search(SimulatedSpace(trials.truths), trials, GOAL)]
    chances, gains = [[of(seen) for seen in ranked] for of in (GOAL.chance, GOAL.gain)]
    assert len(ranked) > 1
    assert chances == sorted(chances)
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 0
