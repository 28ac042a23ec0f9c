"""Uploads of 50 MiB to two real daemons: while they generate, again, and by a driver that is killed
halfway."""

import numpy as np
import pytest

from rpc_schema.uploads import CHUNK_BYTES
from tests.support.checkpoints import prompts
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import connect, greedy_request, scheduler_limits, worker_config
from tests.support.uploading_driver import kill_halfway, tensor
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.group.uploads import HostTensor
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

SIZE = 50 << 20
MAX_TOKENS = 60
LEASE_TTL_S = 2.0
"""Lease of the driver that is killed: it must have sent half of a tensor by then."""


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons that no other module uses."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def config(checkpoint):
    return worker_config(checkpoint().path, pp=2)


def random_tensor(seed):
    values = np.random.default_rng(seed).standard_normal((SIZE // 4096, 1024), np.float32)
    return HostTensor.from_array(values)


def begin(group, loaded):
    driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
    requests = [
        greedy_request(f"r{index}", prompt, MAX_TOKENS)
        for index, prompt in enumerate(prompts(7, [3, 17, 40]))
    ]
    for request in requests:
        driver.add_request(request)
    return driver, requests


def finished(driver, outputs, checkpoint, requests):
    """All of them ended with the tokens of transformers' generate."""
    outputs += driver.run()
    found = {output.req_id: output.token_ids for output in outputs}
    assert found == {
        request.id: checkpoint().greedy(request.prompt.tolist(), MAX_TOKENS) for request in requests
    }


def test_generation_runs_on_while_50_mib_are_uploaded(two_daemons, config, checkpoint):
    between, at_once = random_tensor(1), random_tensor(2)
    with connect(two_daemons.endpoints, config) as (group, loaded):
        driver, requests = begin(group, loaded)
        uploading, outputs, num_steps = group.uploads.begin([between]), [], 0
        while uploading.proceed():
            if num_steps < MAX_TOKENS // 2:
                outputs += driver.step()
                num_steps += 1
        assert driver.busy
        assert group.num_in_flight, "no step was in flight meanwhile"
        names = group.uploads.put([between, at_once])
        assert group.uploads.find(names) == [True, True]
        assert group.num_in_flight
        finished(driver, outputs, checkpoint, requests)
        assert [status.upload_bytes for status in group.get_status()] == [2 * SIZE] * 2
        assert not group.uploads.begin([at_once, between]).proceed(), "nothing is sent twice"


def test_killed_driver_leaves_nothing_behind(two_daemons, config, checkpoint):
    with connect(two_daemons.endpoints, config, reload=False):
        pass  # loaded, and free
    kill_halfway(SIZE, SIZE // CHUNK_BYTES // 2, LEASE_TTL_S, two_daemons.endpoints)
    held = tensor(SIZE)
    with WorkerGroup(two_daemons.endpoints, config.parallel) as observer:
        wait_until(
            lambda: all(status.upload_bytes == 0 for status in observer.get_status()),
            "they are gone with the lease",
        )
    with connect(two_daemons.endpoints, config, reload=False) as (group, loaded):
        assert group.uploads.find([held.content_hash]) == [False]
        assert group.uploads.put([held]) == [held.content_hash]
        driver, requests = begin(group, loaded)
        finished(driver, [], checkpoint, requests)
    with connect(two_daemons.endpoints, config, reload=False) as (group, _):
        assert group.uploads.find([held.content_hash]) == [False]
