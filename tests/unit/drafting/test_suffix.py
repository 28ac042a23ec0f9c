"""Suffix lookup on the CPU against plain Python."""

import numpy as np
import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import RandomRequests, as_gained, check_suffix
from worker_daemon.backend import choose_backend
from worker_daemon.drafting.registry import drafter_bytes, make_drafter

CPU = torch.device("cpu")


def suffix(num_drafts, longest=4, shortest=2, kept=1024):
    return SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
        max_kept_tokens=kept,
    )


def drafter_of(config, num_rows=4, max_model_len=400):
    return make_drafter(config, num_rows, max_model_len, CPU, choose_backend(CPU).texts)


def begin(drafter, row, *tokens):
    drafter.begin([row], [np.array(tokens, np.int32)])


def propose(drafter, num_drafts, *gains):
    return drafter.propose(as_gained(gains, num_drafts, CPU)).tolist()


@pytest.mark.each_value
@pytest.mark.parametrize("num_drafts", [1, 4, 31])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (4, 2), (32, 1)])
@pytest.mark.parametrize("vocab_size", [1, 3, 12, 1000])
def test_random_texts(num_drafts, longest, shortest, vocab_size):
    config = suffix(num_drafts, longest, shortest)
    rng = np.random.default_rng([num_drafts, longest, vocab_size])
    requests = RandomRequests(rng, 5, 90, num_drafts, vocab_size)
    check_suffix(drafter_of(config, 5, 90), requests, config, CPU, num_steps=12, longest=20)


def test_the_oldest_output_goes():
    """More tokens than are kept, with rows that keep and lose their pages, and steps that begin
    more pages than there are."""
    config = suffix(31)
    requests = RandomRequests(np.random.default_rng(2), 40, 400, 31, 5)
    check_suffix(drafter_of(config, 40), requests, config, CPU, num_steps=14, longest=9)


def test_rows_that_are_searched_in_parts():
    """Among many kept tokens, the rows of a step are searched a few at a time."""
    config = suffix(2, kept=1 << 21)
    requests = RandomRequests(np.random.default_rng(4), 7, 60, 2, 4)
    check_suffix(drafter_of(config, 7, 60), requests, config, CPU, num_steps=5, longest=9)


def test_the_token_that_followed_most_often_counts():
    drafter = drafter_of(suffix(2))
    for row, after in ((0, [8, 1]), (1, [7, 2]), (2, [8, 3])):
        begin(drafter, row, 60 + row)
        propose(drafter, 2, (row, [1, 2, 3]))
        propose(drafter, 2, (row, after))
    begin(drafter, 3, 50, 1, 2)
    assert propose(drafter, 2, (3, [3])) == [[8, 3]]
    begin(drafter, 3, 1, 2, 3, 7, 5, 1, 2)
    assert propose(drafter, 2, (3, [3])) == [[7, 5]]


def test_a_longer_match_counts_more_than_votes():
    drafter = drafter_of(suffix(1))
    for row in (0, 1):
        begin(drafter, row, 90)
        propose(drafter, 1, (row, [2, 3]))
        propose(drafter, 1, (row, [7]))
    begin(drafter, 2, 1, 2, 3, 9, 4, 1, 2)
    assert propose(drafter, 1, (2, [3])) == [[9]]


def test_requests_that_still_run_are_searched_but_not_across_each_other():
    drafter = drafter_of(suffix(3))
    drafter.begin([0, 1], [np.array([70], np.int32), np.array([80], np.int32)])
    for first, second in ((1, 11), (2, 12), (3, 13), (4, 14)):
        propose(drafter, 3, (0, [first]), (1, [second]))
    begin(drafter, 2, 50, 1)
    assert propose(drafter, 3, (2, [2])) == [[3, 4, 0]]
    begin(drafter, 2, 50, 4)
    assert propose(drafter, 3, (2, [14])) == [[0, 0, 0]]


def test_prompts_are_not_kept_and_output_is_after_forget():
    drafter = drafter_of(suffix(2))
    begin(drafter, 0, 1, 2, 3, 4)
    propose(drafter, 2, (0, [5, 6, 7]))
    drafter.forget()
    begin(drafter, 0, 1)
    assert propose(drafter, 2, (0, [2])) == [[0, 0]]
    begin(drafter, 0, 5)
    assert propose(drafter, 2, (0, [6])) == [[7, 0]]


def test_a_drafter_that_restarts_drafts_as_a_new_one():
    """Another rank may be new."""
    old, new = (drafter_of(suffix(2)) for _ in range(2))
    begin(old, 0, 1, 2, 3, 4)
    begin(old, 1, 8, 9)
    propose(old, 2, (0, [5, 6, 7]), (1, [5, 6, 2]))
    old.restart()
    for drafter in (old, new):
        begin(drafter, 2, 1)
    gains = [(2, [5]), (2, [6, 2]), (2, [5, 6])]
    found = [[propose(drafter, 2, gain) for gain in gains] for drafter in (old, new)]
    assert found[0] == found[1] and found[0][1:] == [[[0, 0]], [[2, 5]]]
    assert old._kept.clock == new._kept.clock


def test_a_request_does_not_vote_for_itself_twice():
    drafter = drafter_of(suffix(1))
    begin(drafter, 0, 60)
    propose(drafter, 1, (0, [1, 2]))
    propose(drafter, 1, (0, [9, 9]))
    for row in (1, 2):
        begin(drafter, row, 60)
        propose(drafter, 1, (row, [1, 2]))
        propose(drafter, 1, (row, [8, 5]))
    propose(drafter, 1, (0, [1]))
    assert propose(drafter, 1, (0, [2])) == [[8]]


def test_a_row_that_fails_gains_nothing():
    drafter = drafter_of(suffix(2))
    begin(drafter, 0, 1, 2, 3, 1)
    propose(drafter, 2, (0, [-1]))
    assert propose(drafter, 2, (0, [2])) == [[3, 1]]


def test_a_step_without_samples():
    assert drafter_of(suffix(3)).propose(as_gained([], 3, CPU)).shape == (0, 3)


def test_the_plan_knows_its_memory():
    config = suffix(5, kept=5000)
    drafter = drafter_of(config, 3, 100)
    tables = (drafter._texts.table, drafter._kept)
    tensors = [getattr(table, name) for table in tables for name in table.__slots__]
    assert drafter_bytes(config, 3, 100) == sum(t.numel() * t.element_size() for t in tensors)
