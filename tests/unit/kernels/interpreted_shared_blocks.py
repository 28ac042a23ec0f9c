"""Blocks that a step of vLLM's fills and reads, small. The interpreter runs programs one after the
other, the longest sequence's first: a reader comes before what it should read."""

import pytest

from benchmarks.paged_reference import Shape
from tests.support.shared_blocks import Meeting, check_other_steps, check_planned_steps, is_right

pytestmark = pytest.mark.each_value  # make test-all runs every combination

SHAPE = Shape(2, 1, 16)


@pytest.mark.parametrize("seed", range(3))
def test_steps_of_the_mapping_read_what_was_filled(seed: int) -> None:
    check_planned_steps(Meeting(SHAPE, "cpu", seed, 1))


def test_a_few_decodes_in_one_step_read_what_was_there_before() -> None:
    errors = Meeting(SHAPE, "cpu", 1, 1).errors({"a", "b", "r0"})
    assert not is_right(errors["b"])
    assert is_right(errors["a"]) and is_right(errors["r0"])


@pytest.mark.parametrize(
    ("filling", "reading", "num_others"), [(9, 1, 1), (1, 7, 1), (16, 16, 0), (1, 1, 16)]
)
def test_other_steps_store_before_they_read(filling: int, reading: int, num_others: int) -> None:
    check_other_steps(Meeting(SHAPE, "cpu", 2, num_others, filling, reading))
