"""All frozen cases."""

import pytest

from tests.engine.frozen import CASES, assert_frozen


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_case_is_what_it_was(number: int) -> None:
    assert_frozen(CASES[number])
