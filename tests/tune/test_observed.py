"""What is known of a candidate: intervals by published values, and how promising that makes it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multinomial

from stepsaver.tune.observed import Goal, Observed, drop_interval, speed_interval
from tests.tune.simulated import FRESH

GOAL = Goal(0.01, 0.95, FRESH)


def test_the_drops_interval_is_tangos() -> None:
    """21 children before and after a transplantation: Fagerland et al., Statistics in Medicine 33, 2014."""
    assert drop_interval(Observed(21, 1, 7, ()), 0.95) == pytest.approx((-6 / 21, -0.517, -0.026), abs=5e-4)
    assert drop_interval(Observed(21, 7, 1, ()), 0.95) == pytest.approx((6 / 21, 0.026, 0.517), abs=5e-4)


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


def test_the_speed_ups_interval_is_students_of_the_logarithms() -> None:
    """ln 1, ln 2, ln 4: a mean of ln 2, a standard error of ln 2 / sqrt(3), and t(2) of 4.3027 at 95 %."""
    found = speed_interval((1.0, 2.0, 4.0), 0.95)
    width = 2 ** (4.302653 / 3**0.5)
    assert found == pytest.approx((2.0, 2 / width, 2 * width), rel=1e-6)
    assert speed_interval((1.5,), 0.95) == (1.5, 0.0, float("inf"))


def test_a_drop_counts_as_far_as_problems_tell_it_from_others() -> None:
    """Before any it is half the limit, give or take a point."""
    drop, variance = GOAL.expected_drop(Observed(640, 40.0, 20.0, ()))
    error = 61 / 640 / 640
    known = 1e-4 / (1e-4 + error)
    assert drop == pytest.approx(known * 20 / 640 + (1 - known) * 0.005)
    assert variance == pytest.approx(known * error)
    lucky, even = GOAL.expected_drop(Observed(64, 0, 6, ())), GOAL.expected_drop(Observed(64, 3, 3, ()))
    assert -0.006 < lucky[0] < even[0] < 0.005


def test_what_promises_most_is_fast_and_likely_to_be_confirmed() -> None:
    steady, slower = Observed(1280, 10, 10, (1.5,)), Observed(1280, 10, 10, (1.4,))
    worse, worst = Observed(1280, 24, 10, (1.5,)), Observed(1280, 100, 10, (3.0,))
    assert GOAL.chance(steady) == GOAL.chance(slower) > 0.9
    assert GOAL.gain(steady) > GOAL.gain(slower) > GOAL.gain(worse) > GOAL.gain(worst)
    assert GOAL.chance(worst) < 0.001
    assert Goal(0.01, 0.95, 200).chance(steady) < 0.2, "few fresh problems confirm little"
    assert Goal(0.01, 0.95, FRESH, floor=1.6).gain(steady) < 0, "it has to be faster than whatever is there"
