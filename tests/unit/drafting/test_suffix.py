"""Suffix lookup on the CPU against plain Python."""

import numpy as np
import pytest
import torch

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import (
    KeptOutput,
    RandomRequests,
    ToldDrafter,
    as_gained,
    check_suffix,
    voted,
)
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.drafting.interface import ComputedStep
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


def told(config):
    return ToldDrafter(drafter_of(config))


def begin(drafter, row, *tokens):
    drafter.begin([row], [tokens])


def propose(drafter, num_drafts, *gains):
    return drafter.propose(gains, num_drafts)


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


@pytest.mark.parametrize("seed", range(3))
def test_a_drafter_that_rests_has_what_one_has_that_drafts_after_every_step(seed):
    """While it rests it has the tokens that steps read alone. Requests that end while it rests have
    kept all that they read, and those that begin are drafted for like others."""
    rng, num_rows, num_drafts = np.random.default_rng([70, seed]), 5, 3
    config = suffix(num_drafts, shortest=1)
    drafter, requests = drafter_of(config, num_rows, 300), RandomRequests(rng, num_rows, 90, 3, 5)
    kept, rows = KeptOutput(1024 // 32), list(range(num_rows))
    kept.begin(requests.begin(drafter, 1.0, longest=20))
    num_found = 0
    for _ in range(160):
        follow(drafter, requests.texts)
        gains = [(row, requests.tokens(1)) for row in rows]
        for row, tokens in gains:
            requests.texts[row] = requests.texts[row] + tokens
        ending = [row for row in rows if len(requests.texts[row]) > 60 and rng.random() < 0.1]
        drafts = not ending and rng.random() < 0.15
        kept.gain([gain for gain in gains if gain[0] not in ending])
        if drafts:
            gained = as_gained(gains, num_drafts, CPU, requests.texts)
            found = drafter.propose(gained).tolist()
            assert found == [voted(requests.texts[r], kept, r, 4, 1, num_drafts) for r in rows]
            num_found += sum(any(own) for own in found)
        for row in ending:
            requests.texts[row] = requests.tokens(int(rng.integers(1, 20)))
            drafter.begin([row], [np.array(requests.texts[row], np.int32)])
            kept.begin([row])
    assert num_found > 30


def follow(drafter, texts):
    """Let a drafter follow a decode of all rows, whose last tokens the step has written."""
    lengths = [len(text) for text in texts.values()]
    for (row, text), length in zip(texts.items(), lengths, strict=True):
        drafter.texts[row, length - 1] = text[-1]
    count = len(texts)
    column = torch.arange(count + 1, dtype=torch.int32)
    metadata = AttentionMetadata(
        query_start_loc=column,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_order=column[:-1],
        block_table=torch.zeros(count + 1, 1, dtype=torch.int32),
        seq_rows=torch.tensor([*texts], dtype=torch.int32),
        slot_mapping=column[:-1].long(),
        num_seqs=count,
        max_query_len=1,
        max_seq_len=max(lengths),
        query_lens_np=np.ones(count, np.int32),
        seq_lens_np=np.array(lengths, np.int32),
    )
    none = torch.zeros(count)
    drafter.follow(ComputedStep(none.long(), none, metadata.seq_lens - 1, metadata))


def test_the_token_that_followed_most_often_counts():
    drafter = told(suffix(2))
    for row, after in ((0, [8, 1]), (1, [7, 2]), (2, [8, 3])):
        begin(drafter, row, 60 + row)
        propose(drafter, 2, (row, [1, 2, 3]))
        propose(drafter, 2, (row, after))
    begin(drafter, 3, 50, 1, 2)
    assert propose(drafter, 2, (3, [3])) == [[8, 3]]
    begin(drafter, 3, 1, 2, 3, 7, 5, 1, 2)
    assert propose(drafter, 2, (3, [3])) == [[7, 5]]


def test_a_longer_match_counts_more_than_votes():
    drafter = told(suffix(1))
    for row in (0, 1):
        begin(drafter, row, 90)
        propose(drafter, 1, (row, [2, 3]))
        propose(drafter, 1, (row, [7]))
    begin(drafter, 2, 1, 2, 3, 9, 4, 1, 2)
    assert propose(drafter, 1, (2, [3])) == [[9]]


def test_requests_that_still_run_are_searched_but_not_across_each_other():
    drafter = told(suffix(3))
    drafter.begin([0, 1], [[70], [80]])
    for first, second in ((1, 11), (2, 12), (3, 13), (4, 14)):
        propose(drafter, 3, (0, [first]), (1, [second]))
    begin(drafter, 2, 50, 1)
    assert propose(drafter, 3, (2, [2])) == [[3, 4, 0]]
    begin(drafter, 2, 50, 4)
    assert propose(drafter, 3, (2, [14])) == [[0, 0, 0]]


def test_prompts_are_not_kept_and_output_is_after_forget():
    drafter = told(suffix(2))
    begin(drafter, 0, 1, 2, 3, 4)
    propose(drafter, 2, (0, [5, 6, 7]))
    drafter.drafter.forget()
    begin(drafter, 0, 1)
    assert propose(drafter, 2, (0, [2])) == [[0, 0]]
    begin(drafter, 0, 5)
    assert propose(drafter, 2, (0, [6])) == [[7, 0]]


def test_a_drafter_that_restarts_drafts_as_a_new_one():
    """Another rank may be new."""
    old, new = (told(suffix(2)) for _ in range(2))
    begin(old, 0, 1, 2, 3, 4)
    begin(old, 1, 8, 9)
    propose(old, 2, (0, [5, 6, 7]), (1, [5, 6, 2]))
    old.drafter.restart()
    for drafter in (old, new):
        begin(drafter, 2, 1)
    gains = [(2, [5]), (2, [6, 2]), (2, [5, 6])]
    found = [[propose(drafter, 2, gain) for gain in gains] for drafter in (old, new)]
    assert found[0] == found[1] and found[0][1:] == [[[0, 0]], [[2, 5]]]
    assert old.drafter._kept.clock == new.drafter._kept.clock


def test_a_request_does_not_vote_for_itself_twice():
    drafter = told(suffix(1))
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
    drafter = told(suffix(2))
    begin(drafter, 0, 1, 2, 3, 1)
    propose(drafter, 2, (0, [-1]))
    assert propose(drafter, 2, (0, [2])) == [[3, 1]]


def test_a_step_without_samples():
    assert propose(told(suffix(3)), 3) == []


def test_the_plan_knows_its_memory():
    config = suffix(5, kept=5000)
    drafter = drafter_of(config, 3, 100)
    tables = (drafter._texts.table, drafter._kept)
    tensors = [getattr(table, name) for table in tables for name in table.__slots__]
    assert drafter_bytes(config, 3, 100) == sum(t.numel() * t.element_size() for t in tensors)
