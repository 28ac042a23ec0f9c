"""Reductions over shared windows, by processes that run the kernel under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so they are separate processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from interpreted_peer_reduce import BLANK, CALLS, WINDOW_BYTES

from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@pytest.fixture
def windows(tmp_path):
    """size -> a file with the blank windows of a group."""

    def make(size):
        path = tmp_path / "windows"
        np.full(size * WINDOW_BYTES // 4, BLANK, np.int32).tofile(path)
        return path

    return make


def start(rank, size, path, seed, calls, script="interpreted_peer_reduce.py"):
    environment = dict(os.environ)
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [rank, size, path, seed, calls]
    return subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    return out.strip()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_every_rank_gets_the_same_right_bits(windows, size):
    path = windows(size)
    ranks = [start(rank, size, path, "s", CALLS) for rank in range(size)]
    digests = {finish(process) for process in ranks}
    assert len(digests) == 1
    assert (np.fromfile(path, np.int32) == BLANK).all(), "what was read is blank again"


def test_a_wait_for_a_peer_that_never_comes_can_be_stopped(windows):
    finish(start(0, 2, windows(2), "s", -1))
