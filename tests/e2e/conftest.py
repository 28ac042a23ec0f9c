"""Fixtures for tests on real daemons; tests/support/serving.py says how to use them."""

import random
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.checkpoints import Checkpoint, make_checkpoint
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import FaultyDaemons
from tests.support.serving import LOOKUPS, NO_DRAFTS, DaemonPool, Serve


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


@pytest.fixture(params=["undrafted", *map(exhaustively, LOOKUPS)])
def each_drafter(serve, request):
    """For pytest.mark.usefixtures: runs a test again with drafts, by each method."""
    serve.speculative = LOOKUPS.get(request.param, NO_DRAFTS)
    yield
    serve.speculative = NO_DRAFTS


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


@pytest.fixture(scope="session")
def models(checkpoint):
    """Three checkpoints of one shape, for tests that change weights."""
    options = {"tie_word_embeddings": False, "num_hidden_layers": 2}
    return [checkpoint("Qwen3ForCausalLM", seed=seed, **options) for seed in (91, 92, 93)]


@pytest.fixture(scope="module")
def faulty(model_root, tmp_path_factory):
    """Two daemons that fail on demand."""
    with FaultyDaemons(2, model_root, tmp_path_factory.mktemp("faults")) as daemons:
        yield daemons


@pytest.fixture
def seed():
    """A random seed, printed."""
    value = random.randrange(1 << 30)
    print(f"seed {value}")
    return value
