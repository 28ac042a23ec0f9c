"""Prompt lookup on the CPU against plain Python, and against transformers where it means the
same."""

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from rpc_schema.config import SpeculativeConfig
from tests.support.text_checks import RandomRequests, ToldDrafter, check_ngram, continued
from worker_daemon.backend import choose_backend
from worker_daemon.drafting.registry import drafter_bytes, make_drafter

CPU = torch.device("cpu")


def ngram(num_drafts, longest=4, shortest=2):
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_drafts,
        prompt_lookup_max=longest,
        prompt_lookup_min=shortest,
    )


def drafter_of(config, num_rows=4, max_model_len=64):
    return make_drafter(config, num_rows, max_model_len, CPU, choose_backend(CPU).texts)


def proposed(config, text):
    """Return what is proposed after a text whose last token is gained."""
    drafter = ToldDrafter(drafter_of(config, max_model_len=len(text)))
    drafter.begin([2], [text[:-1]])
    return drafter.propose([(2, text[-1:])], config.num_speculative_tokens)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("num_drafts", [1, 4, 31])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (4, 2), (3, 3), (32, 1)])
@pytest.mark.parametrize("vocab_size", [1, 2, 6, 1000])
def test_random_texts(num_drafts, longest, shortest, vocab_size):
    config = ngram(num_drafts, longest, shortest)
    rng = np.random.default_rng([num_drafts, longest, vocab_size])
    requests = RandomRequests(rng, 5, 40, num_drafts, vocab_size)
    check_ngram(drafter_of(config, 5, 40), requests, config, CPU, num_steps=12)


def test_the_longest_match_counts_then_the_rightmost():
    assert proposed(ngram(2), [1, 2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3]) == [7, 7]
    assert proposed(ngram(2), [2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 2, 3]) == [8, 8]
    assert proposed(ngram(2), [2, 3, 7, 7, 9, 2, 3, 8, 8, 1, 3]) == [0, 0]


def test_a_text_that_repeats_itself_goes_on():
    assert proposed(ngram(7), [9, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1]
    assert proposed(ngram(3), [5, 5, 5]) == [5, 5, 5]


def test_it_proposes_what_transformers_does():
    """transformers takes the leftmost match, and stops at the text's end: texts have one match of
    the longest size that has any, with enough tokens after it."""
    rng = np.random.default_rng(7)
    compared = 0
    while compared < 60:
        text = rng.integers(0, 12, 40).tolist()
        sizes = [size for size in range(1, 5) if len(ends_of(text, size)) > 0]
        if not sizes or len(ends := ends_of(text, sizes[-1])) != 1 or ends[0] > len(text) - 4:
            continue
        theirs = PromptLookupCandidateGenerator(
            num_output_tokens=4, max_matching_ngram_size=4, max_length=1000
        )
        candidates, _ = theirs.get_candidates(torch.tensor([text]))
        assert proposed(ngram(4, shortest=1), text) == candidates[0, len(text) :].tolist()
        compared += 1


def ends_of(text, size):
    """Return the places before the text's end where its last tokens stand before."""
    tail = text[-size:]
    return [end for end in range(size, len(text)) if text[end - size : end] == tail]


def test_a_row_that_fails_gains_nothing():
    drafter = ToldDrafter(drafter_of(ngram(2)))
    drafter.begin([0, 1], [[1, 2, 3, 1]] * 2)
    drafter.propose([(0, [-1]), (1, [2])], 2)
    assert drafter.propose([(0, [2]), (1, [])], 2) == [[3, 1], [3, 1]]


def test_a_drafter_that_restarts_drafts_as_a_new_one():
    """Another rank may be new, and rows may go on."""
    old, new = (ToldDrafter(drafter_of(ngram(2))) for _ in range(2))
    old.begin([0], [[7, 8, 9, 7]])
    old.drafter.restart()
    new.texts = dict(old.texts)
    for gained, expected in (([7, 8], [0, 0]), ([7, 8], [7, 8])):
        assert old.propose([(0, gained)], 2) == new.propose([(0, gained)], 2) == [expected]


def test_tokens_without_room_are_dropped():
    """A row's last steps may sample beyond max_model_len."""
    drafter = ToldDrafter(drafter_of(ngram(2), num_rows=2, max_model_len=6))
    text = [4, 1, 2, 3, 1, 2]
    drafter.begin([0, 1], [text, [8, 9, 8]])
    for _ in range(3):
        drafts = drafter.propose([(0, [3, 1, 2])], 2)
    assert drafts == [continued([*text, 3, 1, 2], 4, 2, 2)]
    assert drafter.propose([(1, [9])], 2) == [[8, 9]]


def test_a_step_without_samples():
    assert ToldDrafter(drafter_of(ngram(3))).propose([], 3) == []


@pytest.mark.parametrize("method", ["none", "driver"])
def test_other_methods_have_no_such_drafter(method):
    config = SpeculativeConfig(method=method, num_speculative_tokens=2)
    assert make_drafter(config, 2, 8, CPU, choose_backend(CPU).texts) is None
    assert drafter_bytes(config, 2, 8) == 0


def test_the_plan_knows_its_memory():
    config = ngram(5)
    drafter = drafter_of(config, 3, 100)
    table = drafter._texts.table
    tensors = (table.tokens, table.lengths, table.scratch)
    assert drafter_bytes(config, 3, 100) == sum(t.numel() * t.element_size() for t in tensors)
