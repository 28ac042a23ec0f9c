"""Daemons that require keys, and peers without the right one: rows 20 to 25 and 28 of the fault
matrix, on real sockets around the fake worker. The daemon on ipc runs without assertions."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import zmq

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import (
    MAX_CONTROL_BYTES,
    MAX_STEP_BYTES,
    decode_control_reply,
    decode_event,
    encode_control,
)
from rpc_schema.config import ParallelConfig
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import ErrorCode, ForbiddenError
from rpc_schema.health import Hello
from tests.support.command_line import probe, run_client
from tests.support.secured import BareSockets, KeyRing, SecuredDaemon, ask, dealer, free_port
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.server.driver import Driver
from worker_client.errors import AuthenticationError, WorkerDied
from worker_client.wire.endpoint import parse_endpoint
from worker_client.wire.keys import NO_KEYS
from worker_client.wire.liveness import Watch
from worker_client.wire.sockets import CUT_OFF_S
from worker_client.wire.transport import ResultsChannel
from worker_client.worker_group import WorkerGroup

TOLD_WITHIN_S = 1.0
SOCKETS = {".step": "step", ".results": "results", ".events": "events"}
DAEMON_ENDPOINTS = ("tcp", "ipc")


@pytest.fixture(scope="module")
def directory():
    path = Path(tempfile.mkdtemp(prefix="sec-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory):
    return KeyRing(directory / "keys")


@pytest.fixture(scope="module")
def daemons(directory, ring):
    """One daemon by scheme, for all tests that leave it as it is."""
    endpoints = {"tcp": f"tcp://127.0.0.1:{free_port()}", "ipc": f"ipc://{directory}/e/w0"}
    ring.trust(dict.fromkeys(endpoints.values(), ring.public["daemon"]))
    tcp = ("--model-root", str(directory), "--data-interface", "lo")
    started = {
        scheme: SecuredDaemon(
            directory,
            endpoint,
            *ring.serve_options(),
            *(tcp if scheme == "tcp" else ()),
            interpreter=("-O",) if scheme == "ipc" else (),
            keys=ring.keys("observer"),
        )
        for scheme, endpoint in endpoints.items()
    }
    yield started
    for daemon in started.values():
        assert daemon.process.poll() is None, daemon.log.read_text()
        daemon.stop()


@pytest.fixture(params=DAEMON_ENDPOINTS)
def daemon(request, daemons):
    return daemons[request.param]


@pytest.fixture
def own_daemon(directory, ring):
    """start(**options): a daemon on ipc for a test that harms it."""
    started = []

    def start(**options):
        endpoint = f"ipc://{directory}/o/{free_port(1)}"
        known = {**json.loads(ring.known.read_text()), endpoint: ring.public["daemon"]}
        ring.trust(known)
        started.append(
            SecuredDaemon(
                directory, endpoint, *ring.serve_options(), keys=ring.keys("admin"), **options
            )
        )
        return started[-1]

    yield start
    ring.authorize("driver", "observer", "admin")
    for each in started:
        each.stop()


@pytest.fixture
def sockets():
    made = BareSockets()
    yield made
    made.close()


class KeyedDriver(Driver):
    """The bare driver of the server's tests, with a key."""

    def __init__(self, daemon: SecuredDaemon, ring: KeyRing, name: str) -> None:
        self._ring, self._name, self._endpoint = ring, name, daemon.endpoint
        super().__init__(daemon.endpoint)

    def _connect(self, kind, address, routing_id=b""):
        place = SOCKETS.get(address.removeprefix(self._endpoint), "control")
        address = getattr(parse_endpoint(self._endpoint, self._ring.keys(self._name)), place)
        return dealer(self.context, address, self._ring, self._name, kind, routing_id)

    def attach(self, *args, **options):
        """By force where the key may; without, whoever held the lease has given it back."""
        return super().attach(*args, force=self._name == "admin", **options)

    def close(self):
        self.send_control(lc.Detach, epoch=self.epoch)
        self.control_reply()  # a refusal, where the key was taken out
        super().close()


# Row 24: whose key is not the right one.


@pytest.mark.parametrize("fault", ["wrong client key", "wrong server key", "no key"])
def test_whoever_lacks_the_right_key_is_told_and_reaches_no_decoder(
    daemon, ring, directory, fault, detection
):
    if fault == "no key" and daemon.endpoint.startswith("tcp"):
        pytest.skip("a client without keys does not even try tcp")
    keys = {"wrong client key": lambda: ring.keys("stranger"), "no key": lambda: NO_KEYS}
    stranger = KeyRing(directory / f"other-{free_port(1)}")
    stranger.trust({daemon.endpoint: stranger.public["daemon"]})
    own = keys[fault]() if fault in keys else stranger.keys("driver")
    before = daemon.decoded
    began = time.monotonic()
    with pytest.raises(AuthenticationError) as caught:
        ask(daemon.endpoint, own, lambda client: client.hello(10 * TOLD_WITHIN_S))
    target_s = TOLD_WITHIN_S + (CUT_OFF_S if fault == "wrong server key" else 0.0)
    detection(24, fault, target_s, time.monotonic() - began, "socket monitor")
    assert caught.value.address == daemon.endpoint
    assert daemon.decoded == before
    wait_until(
        lambda: "refused at the control socket" in daemon.log.read_text(), "the refusal is logged"
    )
    group = pytest.raises(AuthenticationError)
    with WorkerGroup([daemon.endpoint], ParallelConfig(), own) as workers, group:
        workers.attach()
    assert daemon.decoded == before


def test_refusals_name_the_peer_and_no_whole_key(daemon, ring):
    with pytest.raises(AuthenticationError):
        ask(daemon.endpoint, ring.keys("stranger"), lambda client: client.hello(5.0))
    key = ring.public["stranger"]
    wait_until(
        lambda: f"key {key[:8]}: the key is not authorized" in daemon.log.read_text(),
        "the refusal is logged",
    )
    where = "127.0.0.1" if daemon.endpoint.startswith("tcp") else f"pid {os.getpid()} of user"
    status = ask(daemon.endpoint, ring.keys("observer"), lambda client: client.get_status())
    assert status.num_refused > 0
    assert any(where in line and key[:8] in line for line in daemon.log.read_text().splitlines())
    assert key not in daemon.log.read_text()


def test_command_ends_with_77(daemons, ring, directory):
    endpoint = daemons["tcp"].endpoint
    passed = probe(directory, endpoint, "live", *ring.options("observer"))
    assert (passed.returncode, passed.stderr) == (0, "")
    refused = probe(directory, endpoint, "live", *ring.options("stranger"))
    assert (refused.returncode, "AuthenticationError" in refused.stderr) == (77, True)
    refused = run_client(
        directory, "status", "--endpoints", endpoint, *ring.options("stranger"), check=False
    )
    assert (refused.returncode, "AuthenticationError" in refused.stderr) == (77, True)
    forbidden = run_client(
        directory, "shutdown", "--endpoints", endpoint, *ring.options("driver"), check=False
    )
    assert (forbidden.returncode, "ForbiddenError" in forbidden.stderr) == (77, True)


@pytest.mark.parametrize("scheme", DAEMON_ENDPOINTS)
def test_raw_bytes_of_a_stranger_reach_no_decoder(daemons, ring, sockets, scheme):
    daemon = daemons[scheme]
    addresses = parse_endpoint(daemon.endpoint, ring.keys("observer"))[:4]
    before = daemon.decoded
    null_greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\0\0\0\0"
    hello = encode_control(Hello(call=1, protocol_version=1, driver_id=bytes(16)))
    frame = bytes([0, len(hello)]) + hello
    for address in addresses:
        for data in (os.urandom(2000), null_greeting, null_greeting + ready + frame, hello):
            with raw_connection(address) as connection:
                connection.sendall(data)
        unlocked = sockets.open(address, None, "")
        with pytest.raises(zmq.Again):
            for _ in range(100_000):
                unlocked.send(hello, zmq.NOBLOCK)
                # What fills the queue was never taken off it.
        unlocked.close()
    time.sleep(0.3)  # nothing comes: there is no event to wait for
    assert daemon.decoded == before
    assert ask(daemon.endpoint, ring.keys("observer"), lambda client: client.hello())


def raw_connection(address):
    if address.startswith("tcp://"):
        host, port = address.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=5)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(5)
    made.connect(address.removeprefix("ipc://"))
    return made


# Row 25.


def test_captured_bytes_say_nothing_a_second_time(daemons, ring, detection):
    daemon = daemons["tcp"]
    host, port = daemon.endpoint.removeprefix("tcp://").split(":")
    captured, proxy = bytearray(), socket.create_server(("127.0.0.1", 0))
    here = f"tcp://127.0.0.1:{proxy.getsockname()[1]}"
    known = json.loads(ring.known.read_text())
    ring.trust({**known, here: ring.public["daemon"]})

    def relay():
        with proxy.accept()[0] as near, socket.create_connection((host, int(port))) as far:
            back = threading.Thread(target=pump, args=(far, near, bytearray()), daemon=True)
            back.start()
            pump(near, far, captured)
            far.shutdown(socket.SHUT_RDWR)
            back.join(PATIENCE_S)

    relaying = threading.Thread(target=relay, daemon=True)
    relaying.start()
    before = daemon.decoded[0]
    ask(here, ring.keys("admin"), lambda client: client.hello())
    relaying.join(PATIENCE_S)
    proxy.close()
    assert daemon.decoded[0] == before + 1
    assert len(captured) > 500  # greeting, handshake and a message
    for _ in range(3):
        with raw_connection(daemon.endpoint) as again:
            began = time.monotonic()
            again.sendall(captured)
            while again.recv(4096):  # it hangs up on us
                pass
    detection(25, "captured bytes again", 0.1, time.monotonic() - began, "CURVE nonces")
    assert daemon.decoded[0] == before + 1


def pump(source, sink, copy):
    while data := source.recv(4096):
        copy += data
        sink.sendall(data)


# Roles.


def test_observer_asks_and_listens_and_changes_nothing(daemon, ring, sockets):
    keys = ring.keys("observer")
    status = ask(daemon.endpoint, keys, lambda client: client.get_status())
    assert status.serving == "SERVING"
    for request, name in (
        (lambda client: client.prepare_attach(10**6), "PrepareAttach"),
        (lambda client: client.ask(partial(lc.Detach, epoch=1)), "Detach"),
        (
            lambda client: client.ask(partial(lc.OpenRendezvous, epoch=1, link=1, num_ranks=2)),
            "OpenRendezvous",
        ),
        (lambda client: client.shutdown(), "Shutdown"),
    ):
        with pytest.raises(ForbiddenError, match=f"{name} needs the role .* role observer"):
            ask(daemon.endpoint, keys, request)
    addresses = parse_endpoint(daemon.endpoint, keys)
    listening = sockets.open(addresses.events, ring, "observer", zmq.SUB)
    assert listening.poll(20_000)
    assert isinstance(decode_event(listening.recv_multipart()), lc.Heartbeat)
    after = ask(daemon.endpoint, keys, lambda client: client.get_status())
    assert (after.epoch, after.serving, after.load) == (status.epoch, "SERVING", status.load)


def test_observer_cannot_open_the_sockets_of_steps(daemon, ring, sockets):
    before = daemon.decoded
    addresses = parse_endpoint(daemon.endpoint, ring.keys("observer"))
    for address in (addresses.step, addresses.results):
        assert is_refused(sockets.unconnected(ring, "observer"), address)
    assert daemon.decoded == before


def is_refused(made, address):
    """Connect a socket; return True if the daemon refuses its key. After a refusal libzmq does not
    connect again: what misses it waits in vain."""
    monitor = made.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    made.connect(address)
    refused = monitor.poll(20_000)
    made.disable_monitor()
    monitor.close()
    return bool(refused)


def test_driver_drives_and_may_not_save_nor_end(daemon, ring):
    driver = KeyedDriver(daemon, ring, "driver")
    driver.attach()
    driver.make_ready()
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    refused = driver.run(lc.SaveTensorizedModel, name="a", save=bytes(16))
    assert isinstance(refused, ErrorReply)
    assert refused.code is ErrorCode.FORBIDDEN
    assert refused.seq == driver.seq
    assert "SaveTensorizedModel needs the role admin" in refused.message
    assert isinstance(driver.fault(), step.ModelRunnerOutput)  # its seq was an outcome, no gap
    ended = driver.call(lc.Shutdown)
    assert isinstance(ended, ControlErrorReply)
    assert ended.code is ErrorCode.FORBIDDEN
    driver.close()
    admin = KeyedDriver(daemon, ring, "admin")
    admin.attach()
    admin.make_ready()
    saved = admin.run(lc.SaveTensorizedModel, name="a", save=bytes(16))
    assert isinstance(saved, lc.SaveTensorizedModelReply)
    admin.close()


def test_key_that_is_taken_out_is_refused_everywhere(own_daemon, ring, sockets):
    daemon = own_daemon()
    driver = KeyedDriver(daemon, ring, "driver")
    driver.attach()
    driver.make_ready()
    watching = sockets.open(f"{daemon.endpoint}.events", ring, "driver", zmq.SUB)
    staying = sockets.open(f"{daemon.endpoint}.events", ring, "observer", zmq.SUB)
    assert watching.poll(20_000)
    assert staying.poll(20_000)
    ring.authorized.write_text("not JSON")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(
        lambda: "the authorized keys were not reloaded" in daemon.log.read_text(), "they are read"
    )
    assert isinstance(driver.fault(), step.ModelRunnerOutput)

    ring.authorize("observer", "admin")
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "keys with fewer rights" in daemon.log.read_text(), "they are read")
    before = daemon.decoded
    driver.send_fault("none")
    reply = driver.reply()
    assert isinstance(reply, ErrorReply)
    assert (reply.code, reply.seq) == (ErrorCode.FORBIDDEN, 0)
    driver.send_control(lc.GetStatus)
    refused = driver.control_reply()
    assert isinstance(refused, ControlErrorReply)
    assert (refused.code, refused.call) == (ErrorCode.FORBIDDEN, 0)
    assert daemon.decoded == before
    with pytest.raises(AuthenticationError):
        ask(daemon.endpoint, ring.keys("driver"), lambda client: client.hello())
    wait_until(lambda: drained(staying), "what had come is read")
    assert staying.poll(20_000)  # it came in anew by itself
    wait_until(lambda: drained(watching) and not watching.poll(600), "its events end")
    driver.close()


def drained(listening):
    while listening.poll(0):
        listening.recv()
    return True


# Rows 20 and 21: frames that are none.


def test_fifth_bad_frame_bans_the_key_and_nobody_else(own_daemon, ring, sockets, detection):
    daemon = own_daemon()
    bad = sockets.open(daemon.endpoint, ring, "driver")
    for _ in range(5):
        began = time.monotonic()
        bad.send(b"\xc1" * 10)
        assert bad.poll(20_000)
        told_s = time.monotonic() - began
        reply = decode_control_reply(bad.recv_multipart())
        assert isinstance(reply, ControlErrorReply)
        assert reply.code is ErrorCode.BAD_FRAME
    detection(20, "frames that do not decode", 0.1, told_s, "decoder")
    before = daemon.decoded
    bad.send(encode_control(lc.GetStatus(call=1)))
    assert is_refused(sockets.unconnected(ring, "driver"), f"{daemon.endpoint}.step")
    assert not bad.poll(300)
    assert daemon.decoded == before
    with pytest.raises(AuthenticationError):
        ask(daemon.endpoint, ring.keys("driver"), lambda client: client.hello())
    status = ask(daemon.endpoint, ring.keys("observer"), lambda client: client.get_status())
    assert status.num_bad_frames == 5


def test_control_frame_at_the_bound_is_read_and_one_byte_more_is_not(
    daemon, ring, sockets, detection
):
    rss = daemon.rss_bytes
    bare = sockets.open(daemon.endpoint, ring, "admin")
    bare.send(bytes(MAX_CONTROL_BYTES))
    assert bare.poll(10_000)
    reply = decode_control_reply(bare.recv_multipart())
    assert isinstance(reply, ControlErrorReply)
    assert reply.code is ErrorCode.BAD_FRAME
    before = daemon.decoded
    monitor = bare.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    began = time.monotonic()
    bare.send(bytes(MAX_CONTROL_BYTES + 1))
    assert monitor.poll(10_000), "libzmq takes what is over the bound"
    detection(21, "frame over the bound", 1.0, time.monotonic() - began, "socket monitor")
    bare.disable_monitor()
    monitor.close()
    assert daemon.decoded == before
    assert ask(daemon.endpoint, ring.keys("admin"), lambda client: client.hello())
    assert daemon.rss_bytes - rss < 16 << 20


def test_steps_beyond_the_bounds_are_refused_and_not_kept(own_daemon, ring, sockets):
    daemon = own_daemon()
    driver = KeyedDriver(daemon, ring, "driver")
    driver.attach()
    driver.make_ready()
    rss = daemon.rss_bytes
    for frames, code in (
        ([bytes(1 << 16)] * 300, ErrorCode.TOO_LARGE),
        ([bytes(MAX_STEP_BYTES)], ErrorCode.BAD_FRAME),  # at the bound it is read
    ):
        driver.step.send_multipart(frames)
        reply = driver.reply()
        assert isinstance(reply, ErrorReply)
        assert reply.code is code
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    assert daemon.rss_bytes - rss < 64 << 20
    driver.close()


# Row 28, on tcp.


def test_second_daemon_on_a_port_names_the_first(daemons, directory, ring):
    first = daemons["tcp"]
    words = ("serve", "--device", "cpu", "--endpoint", first.endpoint, *ring.serve_options())
    tcp = ("--model-root", str(directory), "--data-interface", "lo")
    second = [sys.executable, "-m", "tests.unit.server.fake_serve", *words, *tcp]
    here = subprocess.run(
        [*second, "--state-dir", str(directory)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert here.returncode == 73
    assert f"pid {first.process.pid}" in here.stderr
    elsewhere = subprocess.run(
        [*second, "--state-dir", str(directory / "s2")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert elsewhere.returncode == 73
    assert "another process listens" in elsewhere.stderr


def test_killed_daemon_with_keys_is_known_by_its_process(directory, ring, detection):
    """By the process alone: no news of the connection are read after the kill. Nobody is turned
    away for it."""
    endpoint = f"ipc://{directory}/p/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    daemon = SecuredDaemon(directory, endpoint, *ring.serve_options(), keys=ring.keys("observer"))
    uid = ask(endpoint, ring.keys("driver"), lambda client: client.hello(5.0).worker_uid)
    named = parse_endpoint(endpoint, ring.keys("driver"))
    try:
        with zmq.Context() as context:
            watch = Watch([named.results], [endpoint], find=lambda at: results.process_at(at))
            results = ResultsChannel(context, [named], b"\1" + os.urandom(15), watch, watch.look)
            watch.met(0, uid)

            def found() -> bool:
                results.read_connection_events(0.01)
                return watch.pid(0) == daemon.process.pid

            wait_until(found, "it is found")
            watch.look()
            refused = ask(
                endpoint, ring.keys("observer"), lambda client: client.get_status().num_refused
            )
            assert refused == 0
            daemon.process.kill()
            began = time.monotonic()
            with pytest.raises(WorkerDied, match="signal: process") as died:
                while time.monotonic() < began + 5:
                    watch.look()
            assert str(daemon.process.pid) in str(died.value)
            name = "kill -9 of a local daemon with keys"
            detection(2, name, 0.1, time.monotonic() - began, "process")
            results.close()
            watch.close()
    finally:
        daemon.stop()
