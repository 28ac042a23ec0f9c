"""A short run of `make fuzz ARGS="--only requests"`: requests of every kind for an AsyncDriver and
the HTTP service, beside healthy ones whose tokens are equal to those that they had alone."""

import random

from tests.support.fuzz_requests import fuzz_count

NUM_REQUESTS = 400
MAX_STALL_CPU_S = 1.0


def test_no_request_ends_the_driver_or_harms_another():
    found = fuzz_count(lambda number: number >= NUM_REQUESTS, random.randrange(10**6))
    assert found["healthy"] > 2 and found["refused"] > 30 and found["served"] > 5, found
    assert found["HTTP 400"] > 30 and found["HTTP 200"] > 2, found
    assert found["longest_stall_cpu_s"] < MAX_STALL_CPU_S, found
