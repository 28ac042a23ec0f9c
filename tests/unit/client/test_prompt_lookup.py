"""Prompt lookup on the host: the continuation of the longest match, of equal ones the last, as a
search of the whole text finds it; in bounded memory."""

import random

import numpy as np
import pytest

from tests.support.exhaustive import seeds
from worker_client.structured import prompt_lookup
from worker_client.structured.prompt_lookup import MIN_MATCH, PromptLookup


def searched(text, ahead, count):
    """The same by bytes.rfind, on one byte a token."""
    whole = bytes([*text, *ahead])
    end = len(text) if ahead else len(text) - 1
    for length in range(len(whole) - 1, MIN_MATCH - 1, -1):
        place = whole.rfind(whole[-length:], 0, end)
        if place >= 0:
            found = list(whole[place + length :])
            return (found * (count // len(found) + 1))[:count]
    return []


def random_text(rng, most=120):
    """Few tokens, and copies of earlier ones."""
    text = []
    size = rng.choice([2, 4, 40])
    while len(text) < most:
        if text and rng.random() < 0.2:
            first = rng.randrange(len(text))
            text += text[first : first + rng.randint(1, 12)]
        text.append(rng.randrange(size))
    return text


@pytest.mark.parametrize("seed", seeds(5, of=100))
def test_it_finds_what_a_search_of_the_whole_text_finds(monkeypatch, seed):
    """However the text came: at once, one by one or several at a time; and behind tokens that are
    only expected."""
    monkeypatch.setattr(prompt_lookup, "MAX_CHAIN", 1 << 20)
    monkeypatch.setattr(prompt_lookup, "MAX_MATCH", 1 << 20)
    rng = random.Random(seed)
    text = random_text(rng)
    num_known = rng.randrange(len(text))
    lookup = PromptLookup(np.array(text[:num_known], np.int32))
    while num_known < len(text):
        num_new = rng.choice([1, 1, 1, rng.randint(1, 9)])
        lookup.extend(text[num_known : num_known + num_new])
        num_known = min(len(text), num_known + num_new)
        count = rng.randint(1, 8)
        for ahead in ([], text[num_known : num_known + rng.randint(0, 5)]):
            expected = searched(text[:num_known], ahead, count)
            assert lookup.following(ahead, count) == expected, (seed, num_known)


def test_a_repeated_text_goes_on_at_its_beginning():
    lookup = PromptLookup(np.array([7, 8, 9, 7, 8], np.int32))
    assert lookup.following([], 8) == [9, 7, 8, 9, 7, 8, 9, 7]
    lookup.extend([9, 7])
    assert lookup.following([], 3) == [8, 9, 7]
    lookup.extend([5])
    assert lookup.following([], 3) == []
    assert lookup.following([7, 8], 2) == [9, 7]


@pytest.mark.parametrize("num_known", [0, 1, 2, 10, 5000])
def test_only_the_newest_tokens_are_kept(monkeypatch, num_known):
    """What was said in the last WINDOW tokens is found, and the index grows no further."""
    monkeypatch.setattr(prompt_lookup, "WINDOW", 256)
    rng = np.random.default_rng(num_known)
    text = rng.integers(0, 1 << 30, 6000, dtype=np.int32)
    lookup = PromptLookup(text[:num_known])
    for token in text[num_known:].tolist():
        lookup.extend([token])
        assert len(lookup._tokens) <= 512 and len(lookup._last) <= 1024
    lookup.extend(text[-200:-197].tolist())
    assert lookup.following([], 50) == text[-197:-147].tolist()
    lookup.extend(text[1000:1003].tolist())
    assert lookup.following([], 1) == []


def test_large_token_ids_have_the_same_place_in_a_prompt_and_behind_it():
    text = np.array([2**31 - 1, 2**31 - 2, 2**31 - 3, 5], np.int32)
    lookup = PromptLookup(text)
    lookup.extend(text[:2].tolist())
    assert lookup.following([], 2) == text[2:].tolist()
