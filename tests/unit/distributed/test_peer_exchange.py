"""Exchanges of rows over shared windows, by processes that run the kernels under Triton's
interpreter."""

import random

import numpy as np
import pytest
from interpreted_peer_exchange import EXCHANGES
from interpreted_peer_reduce import BLANK
from test_peer_reduce import run, windows

pytestmark = pytest.mark.slow
SCRIPT = "interpreted_peer_exchange.py"
__all__ = ["windows"]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_every_rank_gets_all_rows_and_its_sums(windows, size):
    path, seed = windows(size), str(random.randrange(1 << 30))
    print(f"seed {seed}")
    run(size, size, path, seed, EXCHANGES, SCRIPT)
    assert (np.fromfile(path, np.int32) == BLANK).all(), "what was read is blank again"


def test_a_wait_for_a_peer_that_never_comes_can_be_stopped(windows):
    run(2, 1, windows(2), "s", -1, SCRIPT)
