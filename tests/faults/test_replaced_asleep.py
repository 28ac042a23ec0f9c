"""A rank that dies while its group sleeps, updates its weights, or has been reset: it is replaced
in that state, and the group serves again as its state requires."""

import pytest

from tests.support.driving import random_cases
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from tests.support.strangers import gets_in, listening
from worker_client.errors import ClientError, WeightsNotWhole, WorkerDied
from worker_client.worker_group import WorkerGroup

LONG = pytest.mark.exhaustive
AWAKE = {"weights": "awake", "kv_cache": "awake"}


@pytest.fixture(scope="module")
def cases(checkpoint):
    return random_cases(checkpoint(), seed=61, count=3, max_tokens=12)


@pytest.fixture
def pair(two_supervised):
    two_supervised.revive()
    return two_supervised


@pytest.fixture
def config(checkpoint):
    return worker_config(checkpoint().path, 2, enable_sleep_mode=True)


def wake(group: WorkerGroup) -> None:
    group.memory.wake_up()


def wake_and_reload(group: WorkerGroup) -> None:
    group.memory.wake_up()
    with pytest.raises(WeightsNotWhole):
        group.execute_model(None)
    group.weights.reload()


def reload(group: WorkerGroup) -> None:
    with pytest.raises(WeightsNotWhole):
        group.execute_model(None)
    group.weights.reload()


def nothing(group: WorkerGroup) -> None:
    pass


def lose_weights(group: WorkerGroup) -> None:
    group.memory.sleep(2)
    group.memory.wake_up()


def wake_weights_alone(group: WorkerGroup) -> None:
    group.memory.sleep(1)
    group.memory.wake_up(["weights"])


def wake_kv_cache_alone(group: WorkerGroup) -> None:
    group.memory.sleep(1)
    group.memory.wake_up(["kv_cache"])


STATES = {
    "asleep at level 1": (lambda group: group.memory.sleep(1), wake, ("asleep", "asleep")),
    "asleep at level 2": (
        lambda group: group.memory.sleep(2),
        wake_and_reload,
        ("discarded", "discarded"),
    ),
    "kv cache discarded": (
        lambda group: group.memory.discard(["kv_cache"]),
        wake,
        ("awake", "discarded"),
    ),
    "weights awake alone": (wake_weights_alone, wake, ("awake", "discarded")),
    "kv cache awake alone": (wake_kv_cache_alone, wake, ("asleep", "awake")),
    "weights lost": (lose_weights, reload, None),
    "updating": (lambda group: group.weights.start_update(), reload, ("awake", "awake")),
    "reset": (lambda group: group.reset("MODEL_LOADED"), nothing, ("awake", "awake")),
    "reset to nothing": (lambda group: group.reset("CREATED"), nothing, ("awake", "awake")),
}
DEFAULT = ("asleep at level 2", "reset")


@pytest.mark.parametrize(
    "name", [name if name in DEFAULT else pytest.param(name, marks=LONG) for name in STATES]
)
def test_rank_is_replaced_from_every_state(pair, config, cases, name):
    bring, on, tags = STATES[name]
    with connect(pair.endpoints, config) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        bring(group)
        pair.kill(1)
        with pytest.raises(WorkerDied):
            while True:
                group.look()
        pair.restart(1)
        replaced = group.replace(1)
        assert 1 in replaced.ranks
        found = [status.memory_tags for status in group.get_status()]
        if tags is not None:
            assert found == [{"weights": tags[0], "kv_cache": tags[1]}] * 2
        on(group)
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        for process in pair.processes:
            assert not any(gets_in(door) for door in listening(process.pid))


def test_group_that_has_loaded_nothing_says_the_way_out(pair, config, cases):
    with WorkerGroup(pair.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        pair.kill(1)
        pair.restart(1)
        with pytest.raises(ClientError, match="make a new WorkerGroup"):
            group.replace(1)
    pair.revive()
    with connect(pair.endpoints, config) as (group, loaded):
        assert generate(group, loaded, cases.requests).tokens == cases.expected
