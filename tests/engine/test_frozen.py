"""Every eleventh frozen case. `test_all_frozen.py` has all of them."""

import pytest

from tests.engine.frozen import CASES, assert_frozen


@pytest.mark.parametrize("number", range(0, len(CASES), 11))
def test_a_case_is_what_it_was(number: int) -> None:
    assert_frozen(CASES[number])
