"""Rows 7 and 8 of the fault matrix: the network between a driver and its daemons breaks, in both
directions or in one. They live on two hosts (network namespaces) and talk over tcp with keys;
packets sent into the break are silently lost."""

import json
import shutil
import subprocess
import sys
import time

import pytest

from tests.support.command_line import environment, short_directory
from tests.support.delayed_daemon import read_journal
from tests.support.driving import random_cases
from tests.support.far_driver import FarDriver, Plan
from tests.support.secured import KeyRing
from tests.support.serving import worker_config
from tests.support.two_hosts import FAR_ADDRESS, TwoHosts
from tests.support.waiting import wait_until

NOTICED_WITHIN_S = 1.5
SHORT_LEASE_S = 2.0
LONG_LEASE_S = 20.0
FIRST_PORT = 7000
PORTS_APART = 10
RESULTS_PORTS = {FIRST_PORT + PORTS_APART * rank + 2 for rank in range(2)}
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def hosts():
    made = TwoHosts()
    yield made
    made.close()


class FarDaemons:
    """A pipeline of two real daemons on the far host, which note each step that they run, and
    drivers for it on either host."""

    def __init__(self, hosts, model_root, model):
        self.hosts = hosts
        self.directory = short_directory()
        self.cases = random_cases(model, seed=80, count=4, max_tokens=MAX_TOKENS)
        self.journals = [self.directory / f"{rank}.jsonl" for rank in range(2)]
        self._model = model.path
        self._ring = KeyRing(self.directory / "keys")
        self._endpoints = [
            f"tcp://{FAR_ADDRESS}:{FIRST_PORT + PORTS_APART * rank}" for rank in range(2)
        ]
        self._ring.trust(dict.fromkeys(self._endpoints, self._ring.public["daemon"]))
        self._drivers: list[FarDriver] = []
        self.processes = [self._start(rank, model_root) for rank in range(2)]

    def _start(self, rank, model_root):
        options = {
            "endpoint": self._endpoints[rank],
            "device": "cpu",
            "model-root": str(model_root),
            "data-interface": "lo",
            "state-dir": str(self.directory / f"state{rank}"),
            "key-file": str(self._ring.directory / "daemon.key"),
            "authorized-keys": str(self._ring.authorized),
        }
        words = ("-m", "tests.support.delayed_daemon", self.journals[rank], str(rank))
        with self.log(rank).open("wb") as log:
            return subprocess.Popen(
                [*self.hosts.within("far"), sys.executable, *words, json.dumps(options)],
                stdout=log,
                stderr=log,
                env=environment(self.directory),
            )

    def log(self, rank):
        return self.directory / f"daemon{rank}.log"

    def driver(self, side, pp, lease_ttl_s):
        """A driver of the first `pp` daemons on that host, which has not attached yet."""
        plan = Plan(
            endpoints=self._endpoints[:pp],
            key_file=str(self._ring.directory / "driver.key"),
            known_daemons=str(self._ring.known),
            config=worker_config(self._model, pp),
            prompts={case.id: case.prompt.tolist() for case in self.cases.requests},
            max_tokens=MAX_TOKENS,
            lease_ttl_s=lease_ttl_s,
        )
        log = self.directory / f"driver{len(self._drivers)}.log"
        self._drivers.append(FarDriver(plan, self.hosts.within(side), log))
        return self._drivers[-1]

    def times_orphaned(self):
        """How often the first daemon has seen a lease expire."""
        return self.log(0).read_text().count("has ended: waiting")

    def runs(self):
        """What has run on each rank: (epoch, seq)."""
        return [[(stay.epoch, stay.seq) for stay in read_journal(file)] for file in self.journals]

    def dismiss_drivers(self):
        while self._drivers:
            self._drivers.pop().close()

    def close(self):
        self.dismiss_drivers()
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.directory)


@pytest.fixture(scope="module")
def both_daemons(hosts, model_root, checkpoint):
    made = FarDaemons(hosts, model_root, checkpoint())
    yield made
    made.close()


@pytest.fixture
def daemons(both_daemons):
    yield both_daemons
    both_daemons.hosts.heal()
    both_daemons.dismiss_drivers()


def serving(daemons, pp, lease_ttl_s):
    """A driver on the near host that pauses in the middle of its requests."""
    driver = daemons.driver("near", pp, lease_ttl_s)
    driver.tell("load")
    driver.wait_for("attached")
    driver.tell("begin")
    driver.wait_for("paused")
    return driver


def break_network(daemons, driver, pp, *senders):
    """Lose what these hosts send, and let the driver go on; return when, and when it suspected the
    last rank."""
    daemons.hosts.lose(*senders)
    at = time.monotonic()
    driver.tell("go on")
    return at, max(driver.wait_for("suspect").at for _ in range(pp))


def assert_ran_once(daemons):
    for runs in daemons.runs():
        assert len(runs) == len(set(runs))


def test_row_8_lost_replies_are_replayed_and_nothing_runs_twice(daemons, detection):
    driver = serving(daemons, 2, LONG_LEASE_S)
    broken_at, noticed_at = break_network(daemons, driver, 2, "far")
    # A connection that lasts until the network is whole again brings its replies after all.
    wait_until(
        lambda: daemons.hosts.connected_ports().isdisjoint(RESULTS_PORTS),
        "the driver gives the results' connections up",
    )
    before = daemons.runs()
    daemons.hosts.heal()
    backs: set[int] = set()
    while backs != {0, 1}:  # one may be suspect once more, for its events
        backs.add(driver.wait_for("back").rank)
    done = driver.wait_for("generated")
    assert done.tokens == daemons.cases.expected
    assert done.num_replayed >= 1, "the daemons had run what the driver had no answer to"
    assert len(daemons.runs()[1]) > len(before[1])
    assert_ran_once(daemons)
    detection(8, "replies are lost", NOTICED_WITHIN_S, noticed_at - broken_at, "transport")


@pytest.mark.exhaustive
def test_row_7_lease_expires_beyond_a_partition_and_the_driver_attaches_again(daemons, detection):
    driver = serving(daemons, 1, SHORT_LEASE_S)
    orphaned = daemons.times_orphaned()
    broken_at, noticed_at = break_network(daemons, driver, 1, "near", "far")
    wait_until(lambda: daemons.times_orphaned() > orphaned, "the lease expires")
    orphan_s = time.monotonic() - broken_at
    daemons.hosts.heal()
    driver.wait_for("LeaseExpiredError")
    driver.tell("attach")
    driver.wait_for("attached")
    driver.tell("generate")
    assert driver.wait_for("generated").tokens == daemons.cases.expected
    assert_ran_once(daemons)
    detection(7, "partition: suspect", NOTICED_WITHIN_S, noticed_at - broken_at, "transport")
    detection(7, "partition: orphan", SHORT_LEASE_S, orphan_s, "lease")


def test_row_7_two_drivers_on_either_side_of_a_partition_only_one_steps(daemons, detection):
    second = daemons.driver("far", 1, LONG_LEASE_S)
    second.wait_for("ready")
    first = serving(daemons, 1, SHORT_LEASE_S)
    daemons.hosts.lose("near", "far")
    broken_at = time.monotonic()
    first.tell("go on")
    second.tell("attach")  # waits for the lease
    suspect_s = first.wait_for("suspect").at - broken_at
    second.wait_for("attached")
    last_epoch = max(epoch for epoch, _ in daemons.runs()[0])
    second.tell("generate")
    daemons.hosts.heal()
    # A driver that is cut off for longer than the fence timeout gives the daemon up first.
    first.wait_for("FencedError", "dead")
    assert second.wait_for("generated").tokens == daemons.cases.expected
    assert_ran_once(daemons)
    epochs = [epoch for epoch, _ in daemons.runs()[0]]
    assert epochs == sorted(epochs) and epochs[-1] > last_epoch
    detection(7, "partition: suspect", NOTICED_WITHIN_S, suspect_s, "transport")
