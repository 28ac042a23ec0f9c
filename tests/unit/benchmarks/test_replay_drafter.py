"""The drafter that replays recorded outputs, and its mistakes."""

import numpy as np
import pytest
import torch

from benchmarks.replay_drafter import Mistakes, Recording, ReplayDrafter
from tests.support.text_checks import ToldDrafter
from worker_daemon.drafting.row_texts import DraftLimits

CPU = torch.device("cpu")
VOCAB = 50
NO_MISTAKES = Mistakes(0.0, VOCAB)


def replayer(recordings, num_drafts, mistakes=NO_MISTAKES):
    drafter = ReplayDrafter(DraftLimits(3, 64, num_drafts), 5000, CPU)
    drafter.load([Recording([1], [40] * 70)], mistakes)  # to be replaced
    told = ToldDrafter(drafter)
    begin(told, 1, 1)
    drafter.load(recordings, mistakes)
    return told


def begin(drafter, row, *tokens):
    drafter.begin([row], [tokens])


def propose(drafter, num_drafts, *gains):
    return drafter.propose(gains, num_drafts)


@pytest.fixture
def recordings():
    return [
        Recording([1, 2], [10, 11, 12, 13]),
        Recording([1, 2, 3], [20, 21, 22]),
        Recording([5], [30]),
    ]


def test_rows_get_the_tokens_after_those_that_they_gained(recordings):
    drafter = replayer(recordings, 2)
    drafter.begin([2, 0], [[1, 2, 3], [1, 2]])
    assert propose(drafter, 2, (0, [10]), (2, [20])) == [[11, 12], [21, 22]]
    assert propose(drafter, 2, (2, [])) == [[21, 22]]
    assert propose(drafter, 2, (0, [11, 12])) == [[13, 0]]
    assert propose(drafter, 2, (2, [21, 22, 9]), (0, [13])) == [[0, 0], [0, 0]]
    assert propose(drafter, 2, (2, [4, 4, 4]), (0, [4])) == [[0, 0], [0, 0]]


def test_requests_that_resume_go_on_and_others_get_nothing(recordings):
    drafter = replayer(recordings, 3)
    begin(drafter, 1, 1, 2, 10, 11)
    assert propose(drafter, 3, (1, [12])) == [[13, 0, 0]]
    begin(drafter, 1, 7, 7)
    assert propose(drafter, 3, (1, [10]), (0, [1])) == [[0, 0, 0], [0, 0, 0]]
    begin(drafter, 1, 5)
    drafter.drafter.forget()
    assert propose(drafter, 3, (1, [])) == [[0, 0, 0]]


def test_a_share_of_the_tokens_is_wrong_and_always_the_same():
    output = np.random.default_rng(0).integers(0, VOCAB, 4000).tolist()
    recordings = [Recording([9], output[:1000]), Recording([8], output[1000:])]

    def drafts(seed):
        drafter = replayer(recordings, 3000, Mistakes(0.2, VOCAB, seed))
        drafter.begin([0, 1], [[9], [8]])
        first, second = propose(drafter, 3000, (0, []), (1, []))
        assert not any(first[1000:])
        return np.array(first[:1000] + second)

    found = drafts(3)
    assert 0.17 < np.mean(found != output) < 0.23
    assert ((found >= 0) & (found < VOCAB)).all()
    assert np.array_equal(found, drafts(3))
    assert not np.array_equal(found, drafts(4))


def test_without_recordings_there_are_no_drafts():
    drafter = replayer([], 2)
    begin(drafter, 0, 1, 2)
    assert propose(drafter, 2, (0, [3])) == [[0, 0]]
