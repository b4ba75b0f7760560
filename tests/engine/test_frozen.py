"""Every eleventh frozen case; the long campaign has all of them."""

import pytest

from tests.engine.frozen import CASES, assert_frozen

OTHERS = [number for number in range(len(CASES)) if number % 11]


@pytest.mark.parametrize("number", range(0, len(CASES), 11))
def test_a_case_is_what_it_was(number: int) -> None:
    assert_frozen(CASES[number])


@pytest.mark.long
@pytest.mark.parametrize("number", OTHERS)
def test_another_case_is_what_it_was(number: int) -> None:
    assert_frozen(CASES[number])
