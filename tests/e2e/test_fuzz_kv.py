"""A short run of `make fuzz ARGS="--only kv"`: requests get the same tokens whatever becomes of KV
blocks in host memory, in files and on their way to another group."""

import random

import pytest

from tests.support.fuzz_kv import fuzz_count
from tests.support.kv_settings import CONNECTORS, Setting

FEW = 3
"""Cases of a setting."""
OWN = ("kept tier", "files", "peers")


def test_what_goes_wrong_with_moved_blocks_costs_only_time(seed):
    found = fuzz_count(
        lambda number: number >= FEW * len(OWN),
        seed - seed % FEW,
        kills_one_of=0,
        find_setting=lambda number: Setting.of(seed).with_connector(OWN[number % len(OWN)]),
        cases_of_a_setting=FEW,
    )
    assert sum(counts["outputs"] for counts in found.values()) > FEW * len(OWN), found
    assert sum(counts["loaded tokens"] for counts in found.values()) > 0, found
    assert found.keys() == {*OWN}


@pytest.mark.exhaustive
def test_daemons_that_are_killed_meanwhile():
    seed, number = random.randrange(1 << 30), 3 * len(CONNECTORS)
    found = fuzz_count(lambda each: each >= number, seed, kills_one_of=1, cases_of_a_setting=3)
    assert all(counts["cases with kills"] for counts in found.values()), (seed, found)
