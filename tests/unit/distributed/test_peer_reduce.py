"""Reductions over shared windows, by processes that run the kernel under Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so they are separate processes.
"""

import os
import signal
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


def run(size, present, path, seed, calls, script="interpreted_peer_reduce.py"):
    """Run the ranks of a group; return a line of each. present: so many of them."""
    environment = dict(os.environ)
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    words = [size, present, path, seed, calls]
    process = subprocess.Popen(
        [sys.executable, str(HERE / script), *map(str, words)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its forks too
        raise
    assert process.returncode == 0, errors
    return out.split()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
def test_every_rank_gets_the_same_right_bits(windows, size):
    path = windows(size)
    digests = run(size, size, path, "s", CALLS)
    assert len(digests) == size and len({*digests}) == 1
    assert (np.fromfile(path, np.int32) == BLANK).all(), "what was read is blank again"


def test_a_wait_for_a_peer_that_never_comes_can_be_stopped(windows):
    run(2, 1, windows(2), "s", -1)
