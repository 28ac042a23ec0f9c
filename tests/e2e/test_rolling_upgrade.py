"""What docs/upgrading.md says of an upgrade that goes daemon by daemon or driver by driver: while a
driver serves, each daemon is stopped and another release takes its place, and requests end with the
same tokens as in transformers."""

import os
import random
import signal
import sys

import msgspec
import numpy as np
import pytest

from rpc_schema.errors import IncompatibleError
from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from tests.support.driving import random_cases
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler.admissions import AdmissionNote, note_of
from worker_client.worker_group import WorkerGroup

NEXT = "0.2.0"
NOW = f"worker-daemon {SOFTWARE_VERSION}"
THEN = f"worker-daemon {NEXT}"
LINGER_S = 1.0


class Releases:
    """The command lines of daemons: those of this release, until `installed` is another one."""

    def __init__(self, model_root):
        self._root = model_root
        self.installed = ()

    def linger(self, seconds):
        """Have them end so late after SIGTERM: the next step reaches a daemon that shuts down."""
        self.installed = (f"linger={seconds}",)

    def __call__(self, endpoint, device, pipe):
        module = ("tests.support.versioned_serve", *self.installed)
        own = ("--endpoint", endpoint, "--device", device, "--model-root", str(self._root))
        module = module if self.installed else ("worker_daemon",)
        return (sys.executable, "-m", *module, "serve", *own, "--exit-with-parent-fd", str(pipe))


@pytest.fixture
def releases(model_root):
    return Releases(model_root)


@pytest.fixture
def pair(model_root, releases):
    with ForkedDaemons(["cpu", "cpu"], model_root, command=releases) as daemons:
        yield daemons


@pytest.fixture
def lingering_pair(model_root, releases):
    releases.linger(LINGER_S)
    with ForkedDaemons(["cpu", "cpu"], model_root, command=releases) as daemons:
        yield daemons


def software(group):
    return [client.hello().software for client in group.clients]


def upgrade_under_load(shape, daemons, releases, checkpoint, seed):
    """Stop each daemon while a driver serves; return the liveness events of the ranks."""
    cases = random_cases(checkpoint(), seed=seed, count=4, max_tokens=40)
    config = worker_config(checkpoint().path, *shape)
    stops = sorted(random.Random(seed).sample(range(3, 30), 2))
    with connect(daemons.endpoints, config) as (group, loaded):
        assert software(group) == [NOW, NOW]
        results, uids = [], [client.get_status().worker_uid for client in group.clients]

        def replace(died):
            with daemons.kept_alive():  # by a supervisor: a daemon ends in order after its sockets
                group.replace(died.rank)

        def upgrade(result):
            results.append(result)
            if len(results) in stops:
                releases.installed = (f"release={NEXT}",)
                os.kill(daemons.pids[stops.index(len(results))], signal.SIGTERM)

        driver = Driver(
            group, Scheduler(scheduler_limits(loaded, config)), upgrade, recover=replace
        )
        for request in cases.requests:
            driver.add_request(request)
        outputs = {output.req_id: output.token_ids for output in driver.run()}
        assert outputs == cases.expected
        assert software(group) == [THEN, THEN]
        after = [client.get_status().worker_uid for client in group.clients]
        assert not set(after) & set(uids)
        return [event for event in group.watch.events if event.kind == "dead"]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_daemons_are_replaced_one_by_one_under_load(shape, pair, releases, checkpoint, seed):
    upgrade_under_load(shape, pair, releases, checkpoint, seed)


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_steps_that_reach_daemons_that_shut_down_run_on_their_successors(
    shape, lingering_pair, releases, checkpoint, seed
):
    deaths = upgrade_under_load(shape, lingering_pair, releases, checkpoint, seed)
    assert {(each.rank, each.signal) for each in deaths} == {(0, "announced"), (1, "announced")}


def test_successor_of_another_protocol_is_refused_until_the_right_one_is_started(
    pair, releases, checkpoint, seed
):
    cases = random_cases(checkpoint(), seed=seed, count=2, max_tokens=8)
    config = worker_config(checkpoint().path, 2)
    with connect(pair.endpoints, config) as (group, loaded):
        survivor = group.clients[0].get_status()
        other = PROTOCOL_VERSION + 1
        releases.installed = (f"protocol={other}",)
        os.kill(pair.pids[1], signal.SIGKILL)
        pair.restart_dead()
        with pytest.raises(IncompatibleError) as refused:
            group.replace(1)
        assert f"version {other}" in str(refused.value)
        assert f"this driver {PROTOCOL_VERSION}" in str(refused.value)
        releases.installed = ()
        os.kill(pair.pids[1], signal.SIGKILL)
        pair.restart_dead()
        group.replace(1)
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        after = group.clients[0].get_status()
        assert after.worker_uid == survivor.worker_uid
        assert sum("(LoadModel)" in line for line in after.transitions) == 1, "it has not loaded"


def left(note):
    return AdoptedRequest("a", np.array([1, 2], np.int32), 1, 1, (1,), (), note, 0)


def test_notes_of_older_drivers_are_read_and_those_of_newer_ones_refused():
    """New fields of a note come last and have defaults, so drivers can be upgraded and not
    downgraded under running requests."""
    note = msgspec.msgpack.decode(msgspec.msgpack.encode(AdmissionNote(9, 1, 0, 0)))
    assert note_of(left(msgspec.msgpack.encode(note[:4]))).limit == 9
    assert note_of(left(msgspec.msgpack.encode(note))) == AdmissionNote(9, 1, 0, 0)
    with pytest.raises(RequestError, match="another kind of scheduler"):
        note_of(left(msgspec.msgpack.encode([*note, 1])))
    required = [field.name for field in msgspec.structs.fields(AdmissionNote) if field.required]
    assert required == ["limit", "arrival", "num_cached_tokens", "num_preemptions"], (
        "a new field needs a default: drivers of the release before have left notes without it"
    )


def test_driver_of_another_release_adopts_what_is_left(pair, releases, checkpoint, seed):
    """The daemons are of the next release, and this driver is not; their protocol is one."""
    cases = random_cases(checkpoint(), seed=seed, count=2, max_tokens=12)
    config = worker_config(checkpoint().path, 2)
    for rank in range(2):
        os.kill(pair.pids[rank], signal.SIGKILL)
    releases.installed = (f"release={NEXT}",)
    pair.restart_dead()
    with WorkerGroup(pair.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(wait_s=60.0)
        assert software(group) == [THEN, THEN]
        loaded = group.prepare(config, num_gpu_blocks=64)
        first = Driver(group, Scheduler(scheduler_limits(loaded, config)))
        for request in cases.requests:
            first.add_request(request)
        for _ in range(4):
            first.step()
    with WorkerGroup(pair.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        scheduler = Scheduler(scheduler_limits(group.prepare(config, num_gpu_blocks=64), config))
        adopted = group.adopt_requests()
        assert len(adopted) == 2 and all(each.num_computed_tokens for each in adopted)
        done = scheduler.adopt_requests(adopted)
        outputs = [*done, *Driver(group, scheduler).run()]
        assert {output.req_id: output.token_ids for output in outputs} == cases.expected
