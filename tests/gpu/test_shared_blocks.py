"""Requests that begin with a block which another request of vLLM's step fills (rule 4 of
docs/scheduler-rules.md). A step of a few decodes stores and reads keys in one kernel: there, only
the steps of vLLM's mapping keep the reader from what the block held before."""

import pytest
import torch

from benchmarks.paged_reference import Shape
from tests.support.shared_blocks import Meeting, check_other_steps, check_planned_steps, is_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = Shape(32, 8, 128)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_others", [0, 3, 30])
def test_steps_of_the_mapping_read_what_was_filled(seed: int, num_others: int) -> None:
    check_planned_steps(Meeting(SHAPE, "cuda", seed, num_others))


@pytest.mark.parametrize("num_others", [0, 3, 30])
def test_a_few_decodes_in_one_step_read_what_was_there_before(num_others: int) -> None:
    """The reason for the mapping's order, without which the test above fails: all programs begin at
    once, and load keys before they store their own."""
    meetings = [Meeting(SHAPE, "cuda", seed, num_others) for seed in range(20)]
    errors = [meeting.errors({*meeting.rows}) for meeting in meetings]
    num_wrong = sum(not is_right(each["b"]) for each in errors)
    print(f"{num_wrong} of {len(errors)} readers found stale keys")
    assert num_wrong
    assert all(is_right(error) for each in errors for r, error in each.items() if r != "b")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("filling", "reading", "num_others"),
    [(9, 1, 3), (1, 7, 3), (16, 16, 0), (1, 1, 45)],
    ids=["chunk fills", "chunk reads", "prompts", "many decodes"],
)
def test_other_steps_store_before_they_read(
    seed: int, filling: int, reading: int, num_others: int
) -> None:
    """With a prompt among its requests, or with many decodes, a step stores in a kernel of its own:
    it may break the rule."""
    check_other_steps(Meeting(SHAPE, "cuda", seed, num_others, filling, reading))
