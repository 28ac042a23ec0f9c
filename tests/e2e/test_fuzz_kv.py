"""A short run of `make fuzz ARGS="--only kv"`: requests get the same tokens whatever becomes of KV
blocks in host memory, in files and on their way to another group."""

import random

import pytest

from tests.support.fuzz_kv import fuzz_count


def test_what_goes_wrong_with_moved_blocks_costs_only_time(seed):
    found = fuzz_count(lambda number: number >= 24, seed, ["tier", "files", "peers"], 0)
    assert sum(counts["outputs"] for counts in found.values()) > 24, found
    assert all(counts["loaded tokens"] for counts in found.values()), found


@pytest.mark.exhaustive
def test_daemons_that_are_killed_meanwhile():
    seed = random.randrange(1 << 30)
    found = fuzz_count(lambda number: number >= 21, seed, kills_one_of=1)
    assert all(counts["cases with kills"] for counts in found.values()), (seed, found)
