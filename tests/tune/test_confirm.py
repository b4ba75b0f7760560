"""What a tuning promises, by simulated searches with known truths; and attempts, on disk before they begin."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from stepsaver.bench.statistics import fewest_samples
from stepsaver.engine.errors import UsageError
from stepsaver.tune.confirm import (
    MOST_ATTEMPTS,
    Attempt,
    Attempts,
    confidence_of,
    confirm,
    judged,
    problems_needed,
)
from stepsaver.tune.observed import Goal, Observed, drop_interval
from tests.tune.simulated import FRESH, SimulatedTrials, Truth, tuned, with_pairs

SEARCHES, GOAL = 500, Goal(0.01, 0.95, FRESH)
SETTINGS = {"max_drop": 1.0, "task": "t"}


def drawn_truths(seed: int, limit: float) -> dict[str, Truth]:
    """Where it is hardest: the faster a candidate, the further beyond the limit, and most just beyond it."""
    generator = np.random.default_rng(1000 + seed)
    singles = {}
    for place in range(6):
        drop = limit * generator.uniform(-0.5, 2.0)
        won = generator.uniform(0.01, 0.02)
        singles[str(place)] = Truth(1.2 + 0.2 * drop / limit * generator.uniform(0.8, 1.2), won + drop, won)
    return with_pairs(singles)


def test_over_many_searches_the_true_drop_is_beyond_the_limit_in_at_most_five_percent() -> None:
    """And what is found is as fast as before: 1.19 on average was the former search's, with everything else equal."""
    beyond, confirmed, speed_ups = 0, 0, []
    for seed in range(SEARCHES):
        truths = drawn_truths(seed, GOAL.limit)
        found = tuned(truths, GOAL, seed).confirmed
        confirmed += found is not None
        beyond += found is not None and truths[found.name].drop >= GOAL.limit
        speed_ups.append(truths[found.name].speed_up if found else 1.0)
    assert beyond <= 0.05 * SEARCHES
    assert confirmed > 0.5 * SEARCHES, "a search that never confirms anything promises nothing"
    assert np.mean(speed_ups) > 1.2


def test_when_every_candidate_lies_on_the_limit_at_most_five_percent_are_confirmed() -> None:
    on_the_limit = {str(place): Truth(1.5 + 0.1 * place, 0.03, 0.02) for place in range(10)}
    made = [tuned(on_the_limit, GOAL, seed) for seed in range(SEARCHES)]
    assert sum(each.confirmed is not None for each in made) <= 0.05 * SEARCHES
    assert {len(each.made) for each in made} <= {*range(MOST_ATTEMPTS + 1)}


def test_nothing_within_the_limit_is_a_result() -> None:
    assert tuned(with_pairs({str(place): Truth(2.0, 0.2, 0.01) for place in range(4)}), GOAL, 1).made == []


def test_the_error_of_all_attempts_together_is_the_one_that_was_asked_for() -> None:
    errors = [(1 - confidence_of(attempt, 0.95)) / 2 for attempt in range(1, MOST_ATTEMPTS + 1)]
    assert errors == pytest.approx([0.025, 0.0125, 0.00625, 0.003125])
    assert sum(errors) <= 0.05


def test_so_many_problems_as_can_confirm_without_a_difference_and_no_fewer() -> None:
    for limit, least in ((0.05, 74), (0.015, 254), (0.01, 382), (0.005, 766)):
        assert fewest_samples(limit, 0.95) == least
        assert drop_interval(Observed(least, 0, 0, ()), 0.95).high < limit
        assert drop_interval(Observed(least - 2, 0, 0, ()), 0.95).high >= limit


def test_more_problems_are_needed_where_less_is_between_drop_and_limit() -> None:
    goal = Goal(0.01, 0.95, 10**6)
    seen = [Observed(10000, *each, ()) for each in ((240, 220), (200, 200), (200, 300), (0, 0))]
    needed = [problems_needed(each, goal, 0.95) for each in seen]
    assert all(fewer < more for more, fewer in itertools.pairwise(needed))
    assert needed[-1] == fewest_samples(0.01, 0.95)
    assert problems_needed(seen[0], goal, 0.99) > needed[0]
    assert problems_needed(Observed(1000, 40, 20, ()), Goal(0.01, 0.95, 5120), 0.95) == 5120


BEGUN = Attempt(name="x", number=1, confidence=0.95, problems=6000)


@pytest.mark.parametrize(
    ("lost", "speed_ups", "outcome"),
    [
        (0, (1.5, 1.6, 1.5), "confirmed"),
        (100, (1.5, 1.6, 1.5), "rejected"),
        (60, (1.5, 1.6, 1.5), "undecided"),
        (0, (1.5,), "undecided"),
        (0, (0.9, 0.91, 0.9), "rejected"),
        (0, (1.5, 0.8, 1.0), "undecided"),
    ],
)
def test_confirmed_is_surely_within_the_limit_and_surely_faster(
    lost: int, speed_ups: tuple[float, ...], outcome: str
) -> None:
    """Than plain decoding, and than autoregressive decoding where that was timed."""
    assert judged(BEGUN, Observed(6000, lost, 0, speed_ups), 0.01).outcome == outcome
    fast = (2.0, 2.1, 2.0)
    assert judged(BEGUN, Observed(6000, lost, 0, fast, speed_ups), 0.01).outcome == outcome
    found = judged(BEGUN, Observed(6000, lost, 0, speed_ups, fast), 0.01)
    assert found.outcome == outcome
    assert found.over_reference is not None
    assert found.over_reference.value == pytest.approx(8.4 ** (1 / 3))
    assert judged(BEGUN, Observed(6000, lost, 0, fast, ()), 0.01).outcome in ("undecided", "rejected")


class Stopped(Exception):
    pass


class StoppableTrials(SimulatedTrials):
    """Time for few problems, and the first attempt is stopped by whatever may stop it."""

    ran: list[tuple[str, int]]
    affords, stops = 1000, True

    def affordable(self, name: str, problems: int) -> int:
        return min(problems, self.affords)

    def run_first(self, name: str, problems: int) -> Observed | None:
        self.ran = [*getattr(self, "ran", []), (name, problems)]
        if self.stops:
            raise Stopped
        return None if name not in self.truths else super().run_first(name, problems)


RANKED = [(name, Observed(640, 5, 6, (1.5,) * 10)) for name in ("first", "second")]
TRUTHS = {name: Truth(1.5, 0.05, 0.01) for name in ("first", "second")}


def stopped(folder: Path) -> None:
    trials = StoppableTrials(TRUTHS, np.random.default_rng(0), 0.0)
    with pytest.raises(Stopped):
        confirm(Attempts(folder, SETTINGS), RANKED, trials, GOAL)


def test_an_attempt_is_on_disk_before_its_first_problem_and_goes_on_with_exactly_as_many(tmp_path: Path) -> None:
    """Also if there is time for more now, or none, and if the search puts another one first."""
    stopped(tmp_path)
    on_disk = json.loads((tmp_path / "attempts.json").read_text())["attempts"]
    assert on_disk == [BEGUN.model_dump() | {"name": "first", "problems": 1000}]
    for affords in (5120, 0):
        trials = StoppableTrials(TRUTHS, np.random.default_rng(0), 0.0)
        trials.stops, trials.affords = False, affords
        attempts = Attempts(tmp_path, SETTINGS)
        confirm(attempts, RANKED[::-1], trials, GOAL)
        assert trials.ran[0] == ("first", 1000) if affords else not hasattr(trials, "ran")
        assert [(each.name, each.number, each.outcome) for each in attempts.made[:1]] == [("first", 1, "rejected")]
    assert [each.confidence for each in Attempts(tmp_path, SETTINGS).made] == [0.95, 0.975]


def test_a_stopped_attempt_that_nobody_knows_any_more_still_counts(tmp_path: Path) -> None:
    stopped(tmp_path)
    trials = StoppableTrials({"second": Truth(1.5, 0.0, 0.01)}, np.random.default_rng(0), 0.0)
    trials.stops = False
    attempts = Attempts(tmp_path, SETTINGS)
    confirm(attempts, RANKED, trials, GOAL)
    assert [(each.name, each.number, each.outcome) for each in attempts.made] == [
        ("first", 1, "begun"),
        ("second", 2, "confirmed"),
    ]
    assert trials.ran == [("first", 1000), ("second", 1000)]


def test_after_four_attempts_nothing_more_is_tried(tmp_path: Path) -> None:
    names = [str(number) for number in range(6)]
    trials = StoppableTrials(dict.fromkeys(names, Truth(1.5, 0.05, 0.01)), np.random.default_rng(0), 0.0)
    trials.stops, trials.affords = False, FRESH
    for _ in range(2):
        confirm(Attempts(tmp_path, SETTINGS), [(name, RANKED[0][1]) for name in names], trials, GOAL)
    assert [each.name for each in Attempts(tmp_path, SETTINGS).made] == names[:4]
    assert len(trials.ran) == 4


@pytest.mark.parametrize(
    "damage",
    [
        {"settings": None},
        {"settings": [1]},
        {"attempts": None},
        {"attempts": [{"name": "x"}]},
        {"attempts": [{**BEGUN.model_dump(), "number": 2}]},
        {"attempts": [{**BEGUN.model_dump(), "problems": 0}]},
        {"attempts": [{**BEGUN.model_dump(), "outcome": "won"}]},
        {"attempts": [{**BEGUN.model_dump(), "drop": [1, 2]}]},
    ],
)
def test_a_damaged_record_is_one_line(tmp_path: Path, damage: dict[str, object]) -> None:
    """Whatever is left out of it would be a second try at the fresh problems."""
    content = {"settings": SETTINGS, "attempts": [BEGUN.model_dump()]}
    (tmp_path / "attempts.json").write_text(json.dumps(content))
    assert Attempts(tmp_path, SETTINGS).made == [BEGUN]
    for text in (json.dumps(content | damage), "[", "[]", ""):
        (tmp_path / "attempts.json").write_text(text)
        with pytest.raises(UsageError, match=r"attempts.json is damaged: set it aside"):
            Attempts(tmp_path, SETTINGS)


def test_attempts_with_other_settings_belong_to_another_tuning(tmp_path: Path) -> None:
    Attempts(tmp_path, SETTINGS).record(BEGUN)
    with pytest.raises(UsageError, match="is a tuning with another max_drop; choose another folder"):
        Attempts(tmp_path, SETTINGS | {"max_drop": 2.0})
