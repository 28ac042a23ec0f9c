"""Another user of the host, who may connect to anything on the loopback interface: the ranks of a
group accept no strangers after the rendezvous, and no number of connections ends one."""

import pytest

from tests.support.driving import random_cases
from tests.support.exhaustive import exhaustively
from tests.support.serving import connect, generate, worker_config
from tests.support.strangers import flood, gets_in, listening, num_descriptors

ATTEMPTS = 24_000
SLACK = 8
"""Descriptors that a daemon may open itself in the meantime."""


@pytest.fixture(scope="module")
def cases(checkpoint):
    return random_cases(checkpoint(), seed=77, count=3, max_tokens=12)


@pytest.fixture
def pair(two_supervised):
    two_supervised.revive()
    return two_supervised


def test_single_daemon_listens_nowhere(pair, checkpoint, cases):
    with connect(pair.endpoints[:1], worker_config(checkpoint().path)) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        assert listening(pair.processes[0].pid) == []


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), exhaustively(1, 2)])
def test_ranks_that_have_met_let_nobody_in(pair, checkpoint, cases, pp, tp):
    with connect(pair.endpoints, worker_config(checkpoint().path, pp, tp)) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        assert_shut(pair)
        before = [num_descriptors(process.pid) for process in pair.processes]
        doors = [door for process in pair.processes for door in listening(process.pid)]
        assert doors, "gloo keeps its listeners; if it does not, there is nothing to attack here"
        assert sum(flood(door, ATTEMPTS // len(doors)) for door in doors) == 0
        after = [num_descriptors(process.pid) for process in pair.processes]
        assert all(b <= a + SLACK for a, b in zip(before, after, strict=True))
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        group.relink()
        assert_shut(pair)
        pair.kill(1)
        pair.restart(1)
        group.replace(1)
        assert_shut(pair)
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def assert_shut(pair):
    for process in pair.processes:
        assert [door for door in listening(process.pid) if gets_in(door)] == []
