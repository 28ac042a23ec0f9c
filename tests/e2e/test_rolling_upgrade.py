"""What docs/upgrading.md says of an upgrade that goes daemon by daemon or driver by driver: while a
driver serves, each daemon is stopped and another release takes its place, and requests end with the
same tokens as in transformers."""

import os
import signal
import sys
import threading
from pathlib import PurePath

import msgspec
import numpy as np
import pytest

from rpc_schema.errors import IncompatibleError
from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from tests.support import structured
from tests.support.driving import random_cases
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.service_app import service_app
from tests.support.serving import LONG_LEASE, connect, generate, worker_config
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.errors import RequestError, WorkerShutsDown
from worker_client.group.adoption import AdoptedRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler.admissions import AdmissionNote, note_of
from worker_client.worker_group import WorkerGroup

NEXT = "0.2.0"
NOW = f"worker-daemon {SOFTWARE_VERSION}"
THEN = f"worker-daemon {NEXT}"


class Releases:
    """The command lines of daemons: those of this release, until `installed` is another one."""

    def __init__(self, model_root):
        self._root = model_root
        self.installed = ()
        self.lingering = None
        """A directory: daemons of this release that get SIGTERM refuse everything until let_end."""

    def __call__(self, endpoint, device, pipe):
        own = ("--endpoint", endpoint, "--device", device, "--model-root", str(self._root))
        installed = self.installed
        if self.lingering is not None:
            installed = installed or (f"linger={self.lingering / PurePath(endpoint).name}",)
        module = ("tests.support.versioned_serve", *installed) if installed else ("worker_daemon",)
        return (sys.executable, "-m", *module, "serve", *own, "--exit-with-parent-fd", str(pipe))

    def let_end(self, endpoint):
        if self.lingering is not None:
            (self.lingering / PurePath(endpoint).name).touch()


@pytest.fixture
def releases(model_root):
    return Releases(model_root)


@pytest.fixture
def pair(model_root, releases):
    with ForkedDaemons(["cpu", "cpu"], model_root, command=releases) as daemons:
        yield daemons


@pytest.fixture
def lingering_pair(model_root, releases, tmp_path):
    releases.lingering = tmp_path
    with ForkedDaemons(["cpu", "cpu"], model_root, command=releases) as daemons:
        yield daemons
        for endpoint in daemons.endpoints:
            releases.let_end(endpoint)


def software(group):
    return [client.hello().software for client in group.clients]


def upgrade_under_load(shape, daemons, releases, checkpoint, seed):
    """Stop each daemon while a driver serves; return the signals of the ranks' deaths."""
    cases = random_cases(checkpoint(), seed=seed, count=4, max_tokens=40)
    config = worker_config(checkpoint().path, *shape)
    when = np.random.default_rng(seed).integers(2, 12, size=2).tolist()
    print(f"stopped after {when} results")
    with connect(daemons.endpoints, config) as (group, loaded):
        assert software(group) == [NOW, NOW]
        uids = [client.get_status().worker_uid for client in group.clients]
        next_rank, since, leaving = iter([0, 1]), [], []

        def replace(died):
            releases.let_end(died.endpoint)
            with daemons.kept_alive():  # by a supervisor: a daemon ends in order after its sockets
                group.replace(died.rank)
            since.clear()
            leaving.clear()

        def upgrade(result):
            since.append(result)
            if when and not leaving and len(since) >= when[0]:  # the first one's successor is here
                leaving.append(when.pop(0))
                releases.installed = (f"release={NEXT}",)
                os.kill(daemons.pids[next(next_rank)], signal.SIGTERM)

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
        return [event.signal for event in group.watch.events if event.kind == "dead"]


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
def test_daemons_are_replaced_one_by_one_under_load(shape, pair, releases, checkpoint, seed):
    upgrade_under_load(shape, pair, releases, checkpoint, seed)


@pytest.mark.parametrize("shape", [(2, 1), exhaustively((1, 2))])
def test_steps_that_reach_daemons_that_shut_down_run_on_their_successors(
    shape, lingering_pair, releases, checkpoint, seed
):
    deaths = upgrade_under_load(shape, lingering_pair, releases, checkpoint, seed)
    assert deaths == ["announced", "announced"]


def test_group_that_a_shutdown_kept_from_sleep_is_awake(lingering_pair, releases, checkpoint, seed):
    cases = random_cases(checkpoint(), seed=seed, count=2, max_tokens=8)
    config = worker_config(checkpoint().path, 2, enable_sleep_mode=True)
    with connect(lingering_pair.endpoints, config) as (group, loaded):
        releases.installed = (f"release={NEXT}",)
        os.kill(lingering_pair.pids[1], signal.SIGTERM)
        wait_until(lambda: group.get_status()[1].serving == "DRAINING", "the shutdown")
        with pytest.raises(WorkerShutsDown, match=r"rank 1 at .*; fix: "):
            group.memory.sleep()
        tags = lambda: {*group.clients[0].get_status().memory_tags.values()}  # noqa: E731
        wait_until(lambda: tags() == {"asleep"}, "this rank's sleep")
        releases.let_end(group.clients[1].endpoint.control)
        with lingering_pair.kept_alive():
            group.replace(1)
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_server_that_a_shutdown_kept_from_sleep_answers_as_before(
    lingering_pair, releases, checkpoint
):
    model = checkpoint(seed=83, vocab_size=structured.VOCAB_SIZE)
    structured.make_tokenizer(model.path)
    config = worker_config(model.path, 2, enable_sleep_mode=True)
    ask = {"prompt": [9, 7, 5], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    key = "of an administrator"
    options = {"admin_keys": (key,), "api_keys": ()}
    endpoints = lingering_pair.endpoints
    with service_app(model.path, config, endpoints, **options) as service:

        def serving():
            call = service.context.engine.ask
            work = call(lambda driver: driver.group.get_status()[1].serving)
            return service.runner.run(work)[0]

        before = service.ok("/v1/completions", ask)["choices"]
        releases.installed = (f"release={NEXT}",)
        os.kill(lingering_pair.pids[1], signal.SIGTERM)
        wait_until(lambda: serving() == "DRAINING", "the shutdown")
        end = threading.Timer(0.5, releases.let_end, (endpoints[1],))
        end.start()
        with lingering_pair.kept_alive():
            refused = service.post("/sleep", headers={"Authorization": f"Bearer {key}"})
            assert (refused.status_code, f"rank 1 at {endpoints[1]}" in refused.text) == (503, True)
            assert service.ok("/v1/completions", ask)["choices"] == before
        end.join()
        assert service.context.engine.counts.num_recoveries == 1


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
