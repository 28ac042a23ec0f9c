"""Some time of what `make soak` does for half an hour: random load, a fault every ten seconds, and
each accepted request ends once, with the right tokens. SOAK_SEED repeats a plan."""

import os
import random

import pytest

from tests.support.exhaustive import exhaustively
from tests.support.serving import worker_config
from tests.support.soak.__main__ import poisoned, soak
from tests.support.soak.driver import Life
from tests.support.soak.scene import Scene


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [25.0, *map(exhaustively, [40.0, 120.0])])
def test_every_accepted_request_ends_once_with_the_right_tokens(checkpoint, seconds):
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(1 << 31)))
    found = soak(poisoned(checkpoint(seed=98)), seconds=seconds, seed=seed)
    assert sum(found["faults"].values()) >= seconds / 10 - 2, (
        "the last may come after all has ended"
    )


def test_driver_that_has_ended_before_a_line_is_replaced(tmp_path):
    scene = Scene(tmp_path, tmp_path, num_ranks=0)
    missing, progress = str(tmp_path / "missing"), str(tmp_path / "progress")
    scene.start_drivers(Life([], worker_config(tmp_path), 1, missing, missing, progress, 0.0))
    try:
        scene.driver.kill()
        scene.driver.wait()
        scene.tell_driver("sleep 0.5")
        scene.tick()
        assert sum(scene.driver_exits.values()) == 1
        assert scene.driver.poll() is None
    finally:
        scene.close()
