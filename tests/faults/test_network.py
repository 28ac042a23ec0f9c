"""The network between ranks fails while that to the driver works: the daemons run in a separate
network namespace whose only device is taken down; the driver's Unix sockets are not affected."""

import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.command_line import short_directory
from tests.support.driving import random_cases
from tests.support.serving import connect, generate, scheduler_limits, worker_config
from tests.support.supervised import Supervised
from worker_client.driver import Driver
from worker_client.errors import LinkGivenUp
from worker_client.group.failure_state import MAX_LINK_FAILURES
from worker_client.scheduler import Scheduler

STEP_DEADLINE_S = 1.0
STEPS_BEFORE = 8


class Network:
    """A network namespace of an unprivileged user, with nothing but a loopback device."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "-Urn", "sh", "-c", "ip link set lo up && echo up && exec sleep 600"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        if self._holder.stdout.readline() != "up\n":
            reason = self._holder.stderr.read().strip()
            self.close()
            pytest.skip(f"no network namespaces here: {reason}")

    @property
    def within(self) -> list[str]:
        """The command that starts another one in here."""
        pid = str(self._holder.pid)
        return ["nsenter", "-t", pid, "-U", "-n", "--preserve-credentials"]

    def set(self, state: str) -> None:
        """Take the device `up` or `down`."""
        subprocess.run([*self.within, "ip", "link", "set", "lo", state], check=True)

    def close(self) -> None:
        """End it."""
        self._holder.kill()
        self._holder.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("needs unshare, nsenter and ip")
    made = Network()
    yield made
    made.close()


def test_data_network_is_cut_and_heals(network, model_root, checkpoint, detection):
    directory = short_directory()
    cases = random_cases(checkpoint(), seed=70, count=4, max_tokens=32)
    config = worker_config(checkpoint().path, 2, step_deadline_ms=int(STEP_DEADLINE_S * 1000))
    daemons = Supervised(2, model_root, directory, network.within)
    cut: list[float] = []
    told: list[float] = []

    def count(_) -> None:
        if len(driver.records) == STEPS_BEFORE:
            network.set("down")
            cut.append(time.monotonic())

    try:
        with connect(daemons.endpoints, config) as (group, loaded):
            before = group.get_status()
            scheduler = Scheduler(scheduler_limits(group, loaded))
            step_failed = scheduler.step_failed

            def hear(outputs, lost_req_ids) -> None:
                if not told:
                    told.append(time.monotonic())
                    network.set("up")
                step_failed(outputs, lost_req_ids)

            scheduler.step_failed = hear
            driver = Driver(group, scheduler, count)
            for request in cases.requests:
                driver.add_request(request)
            outputs = {output.req_id: output.token_ids for output in driver.run()}
            after = group.get_status()
            assert generate(group, loaded, cases.requests).tokens == cases.expected
    finally:
        daemons.close()
        shutil.rmtree(directory)
    assert outputs == cases.expected
    assert told, "the cut was noticed"
    detection(9, "only the data network is cut", STEP_DEADLINE_S + 1.0, told[0] - cut[0], "step")
    assert [s.worker_uid for s in after] == [s.worker_uid for s in before]
    assert min(s.link for s in after) > max(s.link for s in before)


@pytest.mark.exhaustive
def test_data_network_that_stays_cut_is_given_up_until_attached_anew(
    network, model_root, checkpoint
):
    directory = short_directory()
    cases = random_cases(checkpoint(), seed=71, count=2, max_tokens=16)
    config = worker_config(checkpoint().path, 2, step_deadline_ms=int(STEP_DEADLINE_S * 1000))
    daemons = Supervised(2, model_root, directory, network.within)
    try:
        with connect(daemons.endpoints, config) as (group, loaded):
            assert generate(group, loaded, cases.requests).tokens == cases.expected
            before = group.get_status()
            network.set("down")
            with pytest.raises(LinkGivenUp) as given_up:
                generate(group, loaded, cases.requests)
            network.set("up")
            assert given_up.value.num_failures == MAX_LINK_FAILURES and given_up.value.ranks
            with pytest.raises(LinkGivenUp):
                generate(group, loaded, cases.requests)
            group.attach()
            loaded = group.prepare(config, num_gpu_blocks=256)
            assert loaded.was_loaded, "weights and KV cache are what they were"
            assert generate(group, loaded, cases.requests).tokens == cases.expected
            after = group.get_status()
    finally:
        daemons.close()
        shutil.rmtree(directory)
    assert [s.worker_uid for s in after] == [s.worker_uid for s in before]
