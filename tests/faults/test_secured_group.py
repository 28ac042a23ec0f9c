"""A pipeline of two real daemons on tcp, with keys: it generates the right tokens, data between
ranks stays on the chosen interface, nothing is unpickled, no name leads out of the model directory,
and a killed daemon is replaced by its successor."""

import shutil
import tempfile
from pathlib import Path

import pytest

from rpc_schema.errors import ConfigError
from tests.e2e.conftest import checkpoint, model_root
from tests.support.checkpoints import decisive_prompts
from tests.support.secured import KeyRing, RealDaemons
from tests.support.serving import LONG_LEASE, assert_greedy, generate, greedy_request, worker_config
from tests.support.waiting import wait_until
from worker_client.errors import WorkerDied
from worker_client.worker_group import WorkerGroup

__all__ = ["checkpoint", "model_root"]
OWN_LINE = "collections.OrderedDict"
"""Unpickled by the hook's own module, to see that it sees it."""


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="sg-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ring(directory):
    return KeyRing(directory / "keys")


@pytest.fixture
def daemons(directory, ring, model_root):
    started = RealDaemons(directory, ring, ["cpu", "cpu"], model_root)
    yield started
    started.stop()


def is_lost(group: WorkerGroup, rank: int) -> bool:
    """Return True if the group knows that this rank is dead."""
    try:
        group.look()
    except WorkerDied as died:
        assert died.rank == rank
        return True
    return False


def test_secured_group_serves_and_nothing_else_gets_in(daemons, ring, checkpoint):
    model = checkpoint("LlamaForCausalLM", seed=9)
    prompts = decisive_prompts(model, 7, [5, 11], 8)
    requests = [greedy_request(f"r{index}", prompt, 8) for index, prompt in enumerate(prompts)]
    config = worker_config(model.path, 2)
    with WorkerGroup(
        daemons.endpoints, config.parallel, ring.keys("driver"), lease=LONG_LEASE
    ) as group:
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=64)
        run = generate(group, loaded, requests)
        assert_greedy(run, model, requests)
        for rank in range(2):
            addresses, ports = daemons.listening(rank)
            assert addresses == {"127.0.0.1"}
            assert ports, "the tensor plane listens too"
        with pytest.raises(ConfigError):
            group.prepare(worker_config(Path("../secret"), 2), num_gpu_blocks=64, reload=True)
        loaded = group.prepare(config, num_gpu_blocks=64)
        daemons.kill(1)
        wait_until(lambda: is_lost(group, 1), "the loss is noticed", 10)
        daemons.restart(1)
        assert group.replace(1).loaded_ranks == (1,)
        assert_greedy(generate(group, loaded, requests), model, requests)
    for file in daemons.unpickled:
        assert set(file.read_text().splitlines()) == {OWN_LINE}  # once for each start
    assert all(process.poll() is None for process in daemons.processes)
