"""Fixtures for tests on real daemons; tests/support/serving.py says how to use them."""

import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.serving import DaemonPool, Serve


@pytest.fixture(scope="session")
def model_root():
    """The directory that the pool's daemons may read models under."""
    path = Path(tempfile.mkdtemp(prefix="wd-models-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def daemons(model_root):
    """The session's DaemonPool."""
    pool = DaemonPool(model_root)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def serve(daemons):
    """serve(path, pp, tp, **config) -> context manager of (group, loaded)."""
    return Serve(daemons)


@pytest.fixture(scope="session")
def checkpoint(model_root):
    """checkpoint(architecture, rope=..., form=..., seed=..., **overrides) -> Checkpoint; equal
    calls give the same one."""
    made: dict[str, Checkpoint] = {}

    def get(architecture: str = "LlamaForCausalLM", **options: object) -> Checkpoint:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_checkpoint(model_root, architecture, **options)
        return made[key]

    return get
