"""Rows 36 to 39 of the fault matrix: peers that take more than their share. Connections until no
file descriptor is left, connections without end, events and replies that nobody reads. The driver's
own steps go on."""

import resource
import shutil
import socket
import statistics
import threading
import time

import psutil
import pytest
import zmq

from client.errors import TooManyStepsInFlight
from client.scheduler_output import SchedulerOutput
from client.worker_group import WorkerGroup
from rpc_schema import step
from rpc_schema.codec import decode_event
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import ErrorCode, ErrorReply
from rpc_schema.lifecycle import Heartbeat
from tests.support.command_line import short_directory
from tests.support.leased_driver import admit, decode, make_ready
from tests.support.secured import BareSockets, KeyRing, SecuredDaemon, answers, free_port, wait_until
from tests.unit.server.driver import DaemonProcess, Driver
from worker_daemon.server.sequence import REPLAYABLE

SPARE_FILES = 8
FLOOD_S = 1.5
FLOOD_RATE = 1000
MAX_GROWTH_BYTES = 64 << 20


@pytest.fixture(scope="module")
def directory():
    made = short_directory()
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def ring(directory):
    return KeyRing(directory / "keys")


@pytest.fixture(scope="module")
def secured(directory, ring):
    """A daemon on tcp, with the fake worker."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    ring.trust({endpoint: ring.public["daemon"]})
    tcp = ("--model-root", str(directory), "--data-interface", "lo")
    keys = ring.keys("observer")
    daemon = SecuredDaemon(directory, endpoint, *tcp, *ring.serve_options(), keys=keys)
    yield daemon
    daemon.stop()


@pytest.fixture
def group(secured, ring):
    """Its driver, in the middle of a request."""
    with WorkerGroup([secured.endpoint], ParallelConfig(), ring.keys("driver")) as made:
        made.attach()
        make_ready(made)
        admit(made)
        yield made


def steps_on(group, count):
    """Run steps; return the seconds that each took. Each ran once."""
    before, seconds = decode(group), []
    for number in range(1, count + 1):
        began = time.monotonic()
        assert decode(group) == before + number
        seconds.append(time.monotonic() - began)
    return seconds


def knock(secured):
    """Begin a connection to the daemon's control socket, of somebody who never says a word."""
    host, port = secured.endpoint.removeprefix("tcp://").split(":")
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex((host, int(port)))
    return made


def test_row_36_without_file_descriptors_new_peers_wait_and_the_driver_goes_on(
    secured, group, ring
):
    process = psutil.Process(secured.process.pid)
    before = process.rlimit(resource.RLIMIT_NOFILE)
    assert before[0] == before[1], "the daemon has raised its soft limit"
    limit = process.num_fds() + SPARE_FILES
    process.rlimit(resource.RLIMIT_NOFILE, (limit, limit))
    crowd = [knock(secured) for _ in range(3 * SPARE_FILES)]
    wait_until(lambda: process.num_fds() == limit)
    assert not answers(secured.endpoint, ring.keys("observer"))
    steps_on(group, 20)
    for one in crowd:
        one.close()
    wait_until(lambda: answers(secured.endpoint, ring.keys("observer")))
    process.rlimit(resource.RLIMIT_NOFILE, before)
    steps_on(group, 5)
    assert secured.process.poll() is None


def flood(secured, over, counts):
    """Connect FLOOD_RATE times a second, and hang up."""
    began, made = time.monotonic(), []
    while not over.is_set():
        made.append(knock(secured))
        counts.append(1)
        if len(made) > 64:
            made.pop(0).close()
        time.sleep(max(0.0, began + len(counts) / FLOOD_RATE - time.monotonic()))
    for one in made:
        one.close()


def test_row_37_flood_of_handshakes_leaves_the_driver_served(secured, group, ring, record_property):
    quiet = steps_on(group, 300)
    rss_before, over, counts = secured.rss_bytes, threading.Event(), []
    thread = threading.Thread(target=flood, args=(secured, over, counts))
    thread.start()
    try:
        began, flooded = time.monotonic(), []
        while time.monotonic() < began + FLOOD_S:
            flooded += steps_on(group, 20)
    finally:
        over.set()
        thread.join()
    assert len(counts) > 100
    assert secured.rss_bytes - rss_before < MAX_GROWTH_BYTES
    wait_until(lambda: answers(secured.endpoint, ring.keys("observer")))
    for name, seconds in (("quiet", quiet), ("flooded", flooded)):
        p99_ms = statistics.quantiles(seconds, n=100)[98] * 1e3
        record_property(f"p99_ms_{name}", round(p99_ms, 3))
    record_property("connections_per_s", round(len(counts) / FLOOD_S))


def test_row_38_slow_reader_of_events_misses_some_and_costs_nobody_else(secured, group, ring):
    """Each load of a model is news of a few hundred bytes; the reader's side takes none of it."""
    address = f"tcp://127.0.0.1:{int(secured.endpoint.rpartition(':')[2]) + 3}"
    sockets = BareSockets()
    slow, attentive = (sockets.open(address, ring, "observer", zmq.SUB) for _ in range(2))
    for reader in (slow, attentive):
        assert reader.poll(5000), "events come"
    rss_before, heard = secured.rss_bytes, 0
    for _ in range(60):
        make_ready(group)
        while attentive.poll(0):
            attentive.recv_multipart()
            heard += 1
    assert heard > 60 * 5, "whoever reads hears all"
    assert secured.rss_bytes - rss_before < MAX_GROWTH_BYTES
    admit(group)
    steps_on(group, 20)
    beats = 0
    while beats < 2:
        assert attentive.poll(2000)
        beats += isinstance(decode_event(attentive.recv_multipart()), Heartbeat)
    sockets.close()


@pytest.fixture
def plain(tmp_path):
    daemon = DaemonProcess(tmp_path / "d")
    yield daemon
    daemon.stop()


def test_row_39_driver_that_takes_no_result_gets_no_further(secured, group):
    """The credits are the client's: the daemon never sees the step too many."""
    last = decode(group)
    futures = [group.execute_model(SchedulerOutput({"none": 1})) for _ in range(2)]
    with pytest.raises(TooManyStepsInFlight, match="2 steps are in flight"):
        group.execute_model(SchedulerOutput({"none": 1}))
    tokens = [future.result().sampled["none"] for future in futures]
    assert tokens == [last + 1, last + 2]
    assert decode(group) == last + 3


def test_row_39_replies_that_nobody_reads_are_dropped_and_kept_for_asking(plain):
    """A driver without credits, which never reads: the daemon waits for nobody."""
    driver, observer = Driver(plain.endpoint), Driver(plain.endpoint)
    driver.attach()
    driver.make_ready()
    rss_before = psutil.Process(plain.process.pid).memory_info().rss
    sent = [driver.send_fault("none") for _ in range(3000)]
    wait_until(lambda: observer.status().last_seq == driver.seq)
    assert psutil.Process(plain.process.pid).memory_info().rss - rss_before < MAX_GROWTH_BYTES
    while driver.results.poll(200):
        driver.results.recv_multipart()
    driver.step.send_multipart(sent[-1])
    (kept,) = driver.replay()
    driver.step.send_multipart(sent[-1 - REPLAYABLE])
    stale = driver.reply()
    assert isinstance(stale, ErrorReply) and stale.code is ErrorCode.STALE
    assert kept
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    for each in (driver, observer):
        each.close()
