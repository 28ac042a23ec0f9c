"""Seconds of what `make fuzz` does for longer: hostile frames on every socket, with and without
keys, and what the daemon has grown by."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.fuzz import fuzz_daemon

SECONDS = 1.2


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="fz-"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("with_keys", [False, True])
def test_hostile_frames_leave_the_daemon_serving(directory, with_keys):
    found = fuzz_daemon(directory, with_keys, 10**9, SECONDS, seed=20)
    assert min(found["decoded"]) > 50, "the frames reached no decoder"
    assert found["answers"] > 50
    assert (found["frames_of_strangers"] > 100) == with_keys
