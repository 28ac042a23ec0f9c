"""A short run of `make fuzz ARGS="--only kv"`: requests get the same tokens whatever becomes of KV
blocks in host memory, in files and on their way to another group."""

import random

import pytest

from tests.support.fuzz_kv import fuzz_count
from tests.support.kv_settings import CONNECTORS

FEW = 4
"""Cases of a setting."""


def test_what_goes_wrong_with_moved_blocks_costs_only_time(seed):
    found = fuzz_count(
        lambda number: number >= 3 * FEW,
        seed - seed % FEW,
        kills_one_of=0,
        connectors=("kept tier", "files", "peers"),
        shapes=((1, 1),),
        cases_of_a_setting=FEW,
    )
    assert sum(counts["outputs"] for counts in found.values()) > 3 * FEW, found
    assert all(counts["loaded tokens"] for counts in found.values()), found


@pytest.mark.exhaustive
def test_daemons_that_are_killed_meanwhile():
    seed, number = random.randrange(1 << 30), 3 * len(CONNECTORS)
    found = fuzz_count(lambda each: each >= number, seed, kills_one_of=1, cases_of_a_setting=3)
    assert all(counts["cases with kills"] for counts in found.values()), (seed, found)
