"""Rows 36 to 39 of the fault matrix, peers that exhaust resources: connections until no file
descriptor is left, endless connections, unread events and replies. The driver's steps continue."""

import resource
import shutil
import socket
import statistics
import threading
import time

import psutil
import pytest
import zmq

from rpc_schema import step
from rpc_schema.codec import Frame, encode_control, split_replayed
from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode
from rpc_schema.lifecycle import Heartbeat
from tests.contract.random_messages import fixed_example
from tests.support.command_line import short_directory
from tests.support.leased_driver import admit, decode, make_ready
from tests.support.secured import KeyRing, SecuredDaemon, answers, dealer, free_port
from tests.support.serving import LONG_LEASE
from tests.support.waiting import wait_until
from tests.unit.server.driver import DaemonProcess, Driver
from worker_client.errors import TooManyStepsInFlight
from worker_client.scheduler_output import SchedulerOutput
from worker_client.worker_group import WorkerGroup
from worker_daemon.server.auth.security import Security
from worker_daemon.server.sequence import REPLAYABLE
from worker_daemon.server.wire.endpoints import IpcEndpoint
from worker_daemon.server.wire.sockets import events_socket

SPARE_FILES = 8
FLOOD_S = 1.5
FLOOD_RATE = 1000
MAX_GROWTH_BYTES = 64 << 20
NUM_EVENTS, BATCH = 8000, 16
BATCH_PAUSE_S = 0.002
"""libzmq looks only every millisecond how far readers have come."""


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
    with WorkerGroup(
        [secured.endpoint], ParallelConfig(), ring.keys("driver"), lease=LONG_LEASE
    ) as made:
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
    """Open a connection to the daemon's control socket and never send anything."""
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
    process.rlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    crowd = [knock(secured) for _ in range(3 * SPARE_FILES)]
    wait_until(lambda: process.num_fds() == limit, "descriptors are used up")
    assert not answers(secured.endpoint, ring.keys("observer"))
    steps_on(group, 20)
    for one in crowd:
        one.close()
    wait_until(lambda: answers(secured.endpoint, ring.keys("observer")), "it answers")
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


def test_row_37_flood_of_handshakes_leaves_the_driver_served(secured, group, ring, detection):
    quiet = steps_on(group, 300)
    rss_before, over, counts = secured.rss_bytes, threading.Event(), []
    thread = threading.Thread(target=flood, args=(secured, over, counts))
    thread.start()
    try:
        began, flooded = time.monotonic(), []
        while time.monotonic() < began + FLOOD_S or len(counts) <= 100:
            flooded += steps_on(group, 20)
    finally:
        over.set()
        thread.join()
    assert secured.rss_bytes - rss_before < MAX_GROWTH_BYTES
    wait_until(lambda: answers(secured.endpoint, ring.keys("observer")), "it answers")
    quiet_s, flooded_s = (statistics.quantiles(each, n=100)[98] for each in (quiet, flooded))
    rate = round(len(counts) / FLOOD_S)
    detection(37, f"p99 of a step, {rate} connections/s", 1.1 * quiet_s, flooded_s, "steps")


def test_row_38_slow_reader_of_events_misses_some_and_costs_nobody_else(directory):
    """The daemon's own events socket, and far more events than any queue holds: as many as a daemon
    publishes in half an hour."""
    endpoint = IpcEndpoint.parse(f"ipc://{directory}/events")
    event = encode_control(fixed_example(Heartbeat))
    rss_before = psutil.Process().memory_info().rss
    context = zmq.Context()
    publisher = events_socket(context, endpoint, Security())
    readers = [dealer(context, endpoint.address("events"), None, "", zmq.SUB) for _ in range(2)]
    slow, attentive = readers
    try:
        for reader in readers:
            while not reader.poll(20):
                publisher.send(event, zmq.NOBLOCK)
        for reader in readers:
            take_all(reader)
        for _ in range(NUM_EVENTS // BATCH):
            for _ in range(BATCH):
                publisher.send(event, zmq.NOBLOCK)
            for _ in range(BATCH):
                assert attentive.poll(20_000), "whoever reads hears all"
                attentive.recv_multipart()
            time.sleep(BATCH_PAUSE_S)
        assert psutil.Process().memory_info().rss - rss_before < MAX_GROWTH_BYTES
        assert 0 < take_all(slow) < NUM_EVENTS // 2
        publisher.send(event, zmq.NOBLOCK)
        assert slow.poll(20_000), "it is served on"
    finally:
        for each in (publisher, *readers):
            each.close(linger=0)
        context.term()


def take_all(reader):
    """Receive all available data; return its size."""
    num = 0
    while reader.poll(50 if num else 0):
        reader.recv_multipart()
        num += 1
    return num


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
    """A driver that ignores the limit of steps in flight and never reads: the daemon does not wait
    for it."""
    driver, observer = Driver(plain.endpoint), Driver(plain.endpoint)
    driver.attach()
    driver.make_ready()
    rss_before = psutil.Process(plain.process.pid).memory_info().rss
    sent = [driver.send_fault("none") for _ in range(3000)]
    wait_until(lambda: observer.status().last_seq == driver.seq, "the step is done")
    assert psutil.Process(plain.process.pid).memory_info().rss - rss_before < MAX_GROWTH_BYTES
    kept: list[tuple[Frame, ...]] = []

    def is_asked_for() -> bool:
        """What is there is read first: where the queue is full, a replay is dropped too."""
        while driver.results.poll(100):
            replayed, frames = split_replayed(driver.results.recv_multipart())
            kept.extend([tuple(frames)] if replayed else [])
        if not kept:
            driver.step.send_multipart(sent[-1])
        return bool(kept)

    wait_until(is_asked_for, "it is asked for")
    assert len(set(kept)) == 1 and len(kept[0]) == 1
    driver.step.send_multipart(sent[-1 - REPLAYABLE])
    stale = driver.reply()
    while not isinstance(stale, ErrorReply):  # a replay that was asked for once too often
        stale = driver.reply()
    assert stale.code is ErrorCode.STALE
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    for each in (driver, observer):
        each.close()
