"""What a tuning promises, by simulated searches with known truths."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multinomial

from stepsaver.tune.confirm import (
    MOST_ATTEMPTS,
    Attempt,
    confidence_of,
    confirm,
    judged,
    least_problems,
    problems_needed,
)
from stepsaver.tune.race import Goal, Observed, drop_interval, speed_interval
from stepsaver.tune.search import search
from tests.tune.simulated import (
    CHUNK,
    FRESH,
    SEARCH_CHUNKS,
    SimulatedSpace,
    SimulatedTrials,
    Truth,
    with_pairs,
)

CONFIDENCE, SEARCHES = 0.95, 500


def tuned(
    singles: dict[str, Truth], limit: float, seed: int, budget: float = 400.0
) -> tuple[list[Attempt], dict[str, Truth]]:
    truths = with_pairs(singles)
    trials = SimulatedTrials(truths, np.random.default_rng(seed), budget)
    goal = Goal(limit, CONFIDENCE, FRESH)
    found = search(SimulatedSpace(truths), trials, goal)
    attempts = confirm(found.ranked, trials.fresh, limit=limit, confidence=CONFIDENCE, most_problems=FRESH)
    return list(attempts), truths


def winner(attempts: list[Attempt]) -> Attempt | None:
    return attempts[-1] if attempts and attempts[-1].outcome == "confirmed" else None


def drawn_truths(seed: int, limit: float) -> dict[str, Truth]:
    """Where it is hardest: the faster a candidate, the further beyond the limit, and most just beyond it."""
    generator = np.random.default_rng(1000 + seed)
    singles = {}
    for place in range(6):
        drop = limit * generator.uniform(-0.5, 2.0)
        won = generator.uniform(0.01, 0.02)
        singles[str(place)] = Truth(1.2 + 0.2 * drop / limit * generator.uniform(0.8, 1.2), won + drop, won)
    return singles


def test_over_many_searches_the_true_drop_is_beyond_the_limit_in_at_most_five_percent() -> None:
    limit, beyond, confirmed = 0.01, 0, 0
    for seed in range(SEARCHES):
        attempts, truths = tuned(drawn_truths(seed, limit), limit, seed)
        found = winner(attempts)
        if found is not None:
            confirmed += 1
            beyond += truths[found.name].drop >= limit
    assert beyond <= 0.05 * SEARCHES
    assert confirmed > 0.5 * SEARCHES, "a search that never confirms anything promises nothing"


def test_when_every_candidate_lies_on_the_limit_at_most_five_percent_are_confirmed() -> None:
    singles = {str(place): Truth(1.5 + 0.1 * place, 0.03, 0.02) for place in range(5)}
    on_the_limit = {name: Truth(each.speed_up, 0.03, 0.02) for name, each in with_pairs(singles).items()}
    confirmed = 0
    for seed in range(SEARCHES):
        trials = SimulatedTrials(on_the_limit, np.random.default_rng(seed), 400.0)
        found = search(SimulatedSpace(on_the_limit), trials, Goal(0.01, CONFIDENCE, FRESH))
        tries = confirm(found.ranked, trials.fresh, limit=0.01, confidence=CONFIDENCE, most_problems=FRESH)
        attempts = list(tries)
        assert len(attempts) <= MOST_ATTEMPTS
        confirmed += winner(attempts) is not None
    assert confirmed <= 0.05 * SEARCHES


def test_a_clear_winner_is_found() -> None:
    singles = {
        "slow and right": Truth(1.05, 0.005, 0.005),
        "fast and wrong": Truth(3.0, 0.12, 0.01),
        "fast and right": Truth(1.6, 0.01, 0.012),
        "useless": Truth(0.8, 0.01, 0.01),
    }
    names = [found.name for seed in range(40) if (found := winner(tuned(singles, 0.01, seed)[0]))]
    assert len(names) >= 36
    fastest = [name for name in names if "fast and right" in name]
    assert len(fastest) >= 0.9 * len(names)
    assert not any("wrong" in name for name in names)


def test_what_was_set_aside_is_ranked_if_all_that_promised_more_fell() -> None:
    """And is then in no list of those that are out."""
    singles = {"steady": Truth(1.3, 0.004, 0.004)} | {f"lucky {n}": Truth(2.5, 0.08, 0.02) for n in range(12)}
    truths = with_pairs(singles)
    for seed in range(20):
        trials = SimulatedTrials(truths, np.random.default_rng(seed), 400.0)
        found = search(SimulatedSpace(truths), trials, Goal(0.01, CONFIDENCE, FRESH))
        assert any(name == "steady" for name, _ in found.ranked)
        assert not {name for name, _ in found.ranked} & found.out.keys()


class LuckyAtFirst(SimulatedTrials):
    """On the first chunk no answer differs, whatever the truth is."""

    def draw(self, truth: Truth, problems: int) -> Sequence[int]:
        is_first = max(chunk for _, chunk in self.done) == 0
        return [0, 0, problems] if is_first else super().draw(truth, problems)


class OneFamily(SimulatedSpace):
    def family(self, name: str) -> str:
        return ""


def test_what_was_set_aside_is_raced_with_the_time_that_is_left() -> None:
    """All that are faster and looked as right fall within a part of the budget, those of a second race too."""
    truths = {"steady": Truth(1.3, 0.004, 0.004)} | {f"lucky {n}": Truth(2.5, 0.3, 0.0) for n in range(12)}
    trials = LuckyAtFirst(truths, np.random.default_rng(0), 400.0)
    found = search(OneFamily(truths), trials, Goal(0.01, CONFIDENCE, FRESH))
    assert [name for name, _ in found.ranked] == ["steady"]
    assert found.ranked[0][1].problems == SEARCH_CHUNKS * CHUNK
    assert all("above the limit" in found.out[name] for name in truths if name != "steady")
    assert not found.aside


def test_a_drop_below_zero_brings_no_candidate_to_the_front() -> None:
    """It still counts in how many problems a confirmation needs."""
    goal = Goal(0.01, CONFIDENCE, FRESH)
    even, lucky = Observed(64, 3, 3, (1.30,)), Observed(64, 0, 6, (1.29,))
    assert goal.chance(lucky) == pytest.approx(goal.chance(even))
    assert goal.expected_gain(lucky) < goal.expected_gain(even)
    assert goal.chance(Observed(64, 4, 2, ())) < goal.chance(even)
    needed = [
        problems_needed(Observed(10000, *each, ()), limit=0.01, confidence=0.95, most=10**6)
        for each in ((100, 100), (70, 130))
    ]
    assert needed[0] > needed[1]


def test_a_drop_so_far_below_zero_that_it_is_no_luck_counts() -> None:
    """Speculative drafts are really better here, and differ in more answers than any rule."""
    goal = Goal(0.01, CONFIDENCE, FRESH)
    better, even = Observed(1319, 40, 100, (1.8,)), Observed(1319, 70, 70, (1.8,))
    assert goal.chance(better) > 2 * goal.chance(even)
    beyond = better.without_luck(2.5)
    assert better.drop < beyond.drop < 0
    assert beyond.lost + beyond.won == pytest.approx(140)
    assert better.without_luck().drop == 0


class Kinds(SimulatedSpace):
    """`a 0` and `a 1` are of one kind."""

    def kind(self, name: str) -> str:
        return name.partition(" ")[0]


def test_more_of_the_kinds_that_promise_most_come_before_more_of_the_others() -> None:
    """One of every kind runs first, however little time there is."""
    turns = [f"{kind} {number}" for number in range(7) for kind in "abcdefghijklm"]
    truths = {name: Truth(2.0 if name.startswith("g") else 1.2, 0.002, 0.002) for name in turns}
    trials = SimulatedTrials(truths, np.random.default_rng(0), budget=60.0)
    found = search(Kinds(truths), trials, Goal(0.03, CONFIDENCE, FRESH))
    assert list(trials.counts)[:13] == turns[:13], "one of every kind, before a second one of any"
    assert {f"g {number}" for number in range(7)} <= trials.counts.keys()
    assert found.never_run
    assert not any(name.startswith("g") for name in found.never_run)


def test_nothing_within_the_limit_is_a_result() -> None:
    singles = {str(place): Truth(2.0, 0.2, 0.01) for place in range(4)}
    attempts, _ = tuned(singles, 0.01, 1)
    assert winner(attempts) is None


@pytest.mark.parametrize(("lost", "won"), [(0.004, 0.004), (0.03, 0.02), (0.0, 0.0), (0.01, 0.0)])
@pytest.mark.parametrize("problems", [400, 900])
def test_the_drops_interval_errs_upwards_as_rarely_as_it_says(lost: float, won: float, problems: int) -> None:
    """Exactly, over all outcomes that matter: the upper bound lies below the truth with 2.5 % at most, about."""
    below = 0.0
    reach = [range(int(problems * share + 8 * (problems * share) ** 0.5) + 1) for share in (lost, won)]
    for many_lost in reach[0]:
        for many_won in reach[1]:
            chance = multinomial.pmf(
                [many_lost, many_won, problems - many_lost - many_won], problems, [lost, won, 1 - lost - won]
            )
            if chance > 1e-9 and drop_interval(Observed(problems, many_lost, many_won, ()), 0.95).high < lost - won:
                below += chance
    assert below <= 0.032


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 3000), st.floats(0, 1), st.floats(0, 1), st.floats(0.5, 0.99))
def test_an_interval_holds_its_value_and_widens_with_confidence(
    problems: int, lost: float, won: float, confidence: float
) -> None:
    observed = Observed(problems, lost * problems / 2, won * problems / 2, ())
    narrow, wide = drop_interval(observed, confidence), drop_interval(observed, 0.5 + confidence / 2)
    assert -1 <= wide.low <= narrow.low + 1e-9
    assert narrow.low <= narrow.value <= narrow.high
    assert narrow.high <= wide.high + 1e-9 <= 1 + 2e-9


def test_without_a_difference_the_interval_is_no_point() -> None:
    assert drop_interval(Observed(100, 0, 0, ()), 0.95).high > 0.03
    least = least_problems(0.01, 0.95)
    assert drop_interval(Observed(least, 0, 0, ()), 0.95).high < 0.01
    assert drop_interval(Observed(least - 5, 0, 0, ()), 0.95).high > 0.01


def test_the_error_of_all_attempts_together_is_the_one_that_was_asked_for() -> None:
    errors = [(1 - confidence_of(attempt, 0.95)) / 2 for attempt in range(1, MOST_ATTEMPTS + 1)]
    assert errors[0] == pytest.approx(0.025)
    assert sum(errors) <= 0.05
    assert all(later < earlier for earlier, later in itertools.pairwise(errors))


def test_one_chunk_says_nothing_about_speed() -> None:
    one = speed_interval(Observed(64, 0, 0, (1.5,)), 0.95)
    assert one.low == 0
    assert one.high == float("inf")
    attempt = judged("x", 1, Observed(6000, 0, 0, (1.5,)), limit=0.01, confidence=0.95)
    assert attempt.outcome == "undecided"
    slower = judged("x", 1, Observed(6000, 0, 0, (0.9, 0.91, 0.9, 0.9)), limit=0.01, confidence=0.95)
    assert slower.outcome == "rejected"


def test_more_problems_are_needed_where_less_is_between_drop_and_limit() -> None:
    near, far = Observed(10000, 240, 220, ()), Observed(10000, 200, 300, ())
    needed = [problems_needed(each, limit=0.01, confidence=0.95, most=10**6) for each in (near, far)]
    assert needed[0] > needed[1] >= least_problems(0.01, 0.95)
    assert problems_needed(Observed(1000, 40, 20, ()), limit=0.01, confidence=0.95, most=5120) == 5120
