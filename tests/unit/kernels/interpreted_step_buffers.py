"""A step's ends under Triton's interpreter; conftest.py runs it."""

import pytest

from tests.support.staging_checks import check_holds, check_turns


@pytest.mark.parametrize("depth", [1, 3])
def test_columns_and_tokens_reach_the_other_side(depth: int) -> None:
    check_turns("cpu", depth, 25, seed=depth)


def test_a_buffer_says_what_it_holds() -> None:
    check_holds("cpu")
