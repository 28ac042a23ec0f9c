"""Strangers on tcp (row 37 of the fault matrix): connections beyond a rate are dropped by the
kernel before anybody reads a byte, and handshakes that are too many, too long or too slow are shut
down. A driver still connects. Also an observer that subscribes to too much."""

import errno
import ipaddress
import os
import resource
import shutil
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from rendezvous.borrowed_sockets import borrowed
from tests.support.command_line import short_directory
from tests.support.secured import BareSockets, KeyRing, SecuredDaemon, ask, dealer, free_port
from tests.support.waiting import wait_until
from worker_client.wire.endpoint import parse_endpoint
from worker_daemon.server.auth.bad_peers import BadPeers
from worker_daemon.server.auth.connection_limit import (
    BURST,
    RATE_PER_S,
    ConnectionLimit,
    TrustedAddresses,
    program,
)
from worker_daemon.server.auth.handshakes import (
    MAX_HANDSHAKE_BYTES,
    MAX_UNKNOWN,
    Handshakes,
    Traffic,
)
from worker_daemon.server.auth.keys import AuthorizedKeys
from worker_daemon.server.auth.security import HANDSHAKE_MS
from worker_daemon.server.auth.zap import ZapHandler

STRANGER, FRIEND = "127.0.0.3", "127.0.0.1"
"""Two hosts, as far as the daemon can see; drivers come from the second."""
FLOOD_S = 3.0
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory: Path) -> KeyRing:
    return KeyRing(directory / "keys")


@pytest.fixture(scope="module")
def daemon(directory, ring):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    ring.trust({endpoint: ring.public["daemon"]})
    tcp = ("--model-root", str(directory), "--data-interface", "lo")
    options = (*ring.serve_options(), *tcp)
    daemon = SecuredDaemon(directory, endpoint, *options, keys=ring.keys("observer"))
    yield daemon
    daemon.stop()


class Flood:
    """Connections from one address, as many as go, each left open for a moment."""

    def __init__(self, port: int) -> None:
        self.num_accepted = 0
        self.num_tried = 0
        self._port = port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Flood":
        self._thread.start()
        return self

    @property
    def counts(self) -> tuple[int, int]:
        """Connections that were accepted by now, and those that were not."""
        accepted = self.num_accepted
        return accepted, self.num_tried - accepted

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.num_tried += 1
            self.num_accepted += connects(self._port, 0.02)
            time.sleep(0.001)


def connects(port: int, within_s: float, source: str = STRANGER) -> bool:
    """Return True if a connection succeeds."""
    with socket.socket() as stranger:
        stranger.settimeout(within_s)
        stranger.bind((source, 0))
        try:
            stranger.connect(("127.0.0.1", port))
        except OSError as error:
            assert isinstance(error, TimeoutError) or error.errno == errno.ECONNRESET
            return False
    return True


ENDS_OF_HANDSHAKES = int(
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
PORTS = ("control", "step", "results", "events")
MAX_GROWTH = 48 << 20
"""What a daemon's memory may grow by under an attack that would take 100 to 640 MiB."""


def port_of(daemon, socket_name):
    return int(daemon.endpoint.rpartition(":")[2]) + PORTS.index(socket_name)


def greet(port):
    """A stranger's connection after its greeting."""
    made = socket.socket()
    made.settimeout(LIMIT_S)
    made.bind((STRANGER, 0))
    made.connect(("127.0.0.1", port))
    made.sendall(GREETING)
    return made


def send_long_command(port, size):
    """All but the last byte of a handshake command, or as much as the daemon takes."""
    with suppress(OSError), greet(port) as stranger:
        stranger.settimeout(3.0)  # longer than a handshake may last
        stranger.sendall(b"\x06" + size.to_bytes(8, "big"))
        piece = bytes(1 << 16)
        for left in range(size - 1, 0, -len(piece)):
            stranger.sendall(piece[:left])
        while stranger.recv(4096):
            pass


class PeakMemory:
    """Watches the largest resident size of a process."""

    def __init__(self, daemon) -> None:
        self._daemon = daemon
        self._before = self._peak = daemon.rss_bytes
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._peak - self._before

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self._peak = max(self._peak, self._daemon.rss_bytes)


def test_long_handshakes_of_strangers_take_no_memory_and_a_driver_comes_in(daemon, ring):
    port = port_of(daemon, "step")
    attack = [threading.Thread(target=send_long_command, args=(port, 16 << 20)) for _ in range(40)]
    with PeakMemory(daemon) as memory:
        for each in attack:
            each.start()
        assert ask(
            daemon.endpoint, ring.keys("driver"), lambda client: client.check_health(LIMIT_S)
        )
        for each in attack:
            each.join(LIMIT_S)
    assert memory.growth < 4 * MAX_GROWTH  # 640 MiB without a limit; how soon it acts is chance
    said = f"refused at the step socket: {STRANGER}:"
    wait_until(lambda: said in daemon.log.read_text(), "it is logged")
    assert "its handshake is too long" in daemon.log.read_text()


def recorded_hello(ring):
    """A socket's first bytes: a greeting and HELLO, which anyone with the public key can send."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        zmq.Context() as context,
        dealer(context, f"tcp://127.0.0.1:{server.getsockname()[1]}", ring, "driver"),
    ):
        with server.accept()[0] as made:
            made.settimeout(LIMIT_S)
            made.sendall(GREETING[:32] + b"\x01" + GREETING[33:])
            sent = b""
            while len(sent) < len(GREETING) + 202:
                sent += made.recv(4096)
        return sent


class Replay:
    """Keeps as many handshakes as it can at the daemon's WELCOME, at a rate below the connection
    limit."""

    def __init__(self, hello: bytes, port: int, source: str) -> None:
        self.num_sent = 0
        self._hello = hello
        self._port = port
        self._source = source
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Replay":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with ExitStack() as held:
            while not self._ended.wait(1.0 / REPLAYS_PER_S):
                made = held.enter_context(socket.socket())
                made.settimeout(LIMIT_S)
                made.bind((self._source, 0))
                made.connect(("127.0.0.1", self._port))
                made.sendall(self._hello)
                self.num_sent += 1


REPLAYS_PER_S = 15.0
NEW_HOSTS = (("127.0.0.5", "127.0.0.6"), ("127.0.0.7", "127.0.0.7"))
"""Of the attack, and of the driver; no authorized key has come from there."""


@pytest.mark.parametrize(("attacker", "host"), NEW_HOSTS)
def test_driver_comes_in_while_a_recorded_hello_is_sent_again_and_again(
    daemon, ring, sockets, attacker, host
):
    port = port_of(daemon, "results")
    with Replay(recorded_hello(ring), port, attacker) as attack:
        wait_until(lambda: attack.num_sent > MAX_UNKNOWN, "the attack is under way")
        for _ in range(3):
            driver = sockets.unconnected(ring, "driver")
            ends = driver.get_monitor_socket(ENDS_OF_HANDSHAKES)
            driver.connect(f"tcp://{host}:0;127.0.0.1:{port}")
            assert ends.poll(20_000)
            assert recv_monitor_message(ends)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            driver.disable_monitor()
            ends.close()


def test_results_socket_takes_no_long_frame_of_a_driver_either(daemon, ring, sockets):
    address = parse_endpoint(daemon.endpoint, ring.keys("driver")).results
    driver = sockets.open(address, ring, "driver")
    ended = driver.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    driver.send(bytes(1024))
    assert ended.poll(20_000)
    driver.disable_monitor()
    ended.close()


def is_shut(stranger):
    """Return True if the daemon has closed the connection."""
    stranger.setblocking(False)
    try:
        stranger.recv(4096)
        return not stranger.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_number_of_unfinished_handshakes_is_bounded(daemon, ring, sockets):
    address = parse_endpoint(daemon.endpoint, ring.keys("driver")).step
    driver = sockets.open(address, ring, "driver")
    ends = driver.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    strangers = [greet(port_of(daemon, "step")) for _ in range(20 - MAX_UNKNOWN)]
    began = time.monotonic()
    newest = [greet(port_of(daemon, "step")) for _ in range(MAX_UNKNOWN)]
    wait_until(lambda: all(map(is_shut, strangers)), "they are shut")
    is_any_shut = any(map(is_shut, newest))
    assert not is_any_shut or time.monotonic() - began >= HANDSHAKE_MS / 1000
    strangers += newest
    wait_until(lambda: all(map(is_shut, strangers)), "they are shut")  # their time is over
    assert not ends.poll(0)
    for stranger in strangers:
        stranger.close()
    driver.disable_monitor()
    ends.close()


@pytest.fixture
def sockets():
    made = BareSockets()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("count", "size", "name"), [(80, 30_000, "observer"), (6_000, 400, "spare")]
)
def test_subscriptions_of_an_observer_take_no_memory(daemon, ring, sockets, count, size, name):
    """By a key of its own each time: either may be banned for 30 s."""
    address = parse_endpoint(daemon.endpoint, ring.keys(name)).events
    listening = sockets.open(address, ring, name, zmq.SUB)
    assert listening.poll(20_000)
    ended = listening.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    with PeakMemory(daemon) as memory:
        for number in range(count):
            listening.subscribe(number.to_bytes(4, "big") * (size // 4))
        assert ended.poll(20_000)
        assert ask(
            daemon.endpoint, ring.keys("driver"), lambda client: client.check_health(LIMIT_S)
        )
    assert memory.growth < MAX_GROWTH
    listening.disable_monitor()
    ended.close()


def test_key_that_subscribed_to_too_much_is_not_let_in_again(daemon, ring, sockets):
    address = parse_endpoint(daemon.endpoint, ring.keys("admin")).events
    handshakes: list[int] = []
    with PeakMemory(daemon) as memory:
        while zmq.EVENT_HANDSHAKE_FAILED_AUTH not in handshakes:
            assert len(handshakes) < 6, handshakes
            listening = sockets.unconnected(ring, "admin", zmq.SUB)
            for _ in range(2000):
                listening.subscribe(os.urandom(460))
            made = listening.get_monitor_socket(ENDS_OF_HANDSHAKES | zmq.EVENT_DISCONNECTED)
            listening.connect(address)
            while made.poll(5000):
                handshakes.append(int(recv_monitor_message(made)["event"]))
                if handshakes[-1] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    break
            listening.disable_monitor()
            made.close()
            listening.close()
    assert handshakes.count(zmq.EVENT_HANDSHAKE_SUCCEEDED) <= 2
    assert memory.growth < MAX_GROWTH


# It uses up what strangers may open: behind the others.
def test_flood_is_kept_out_and_a_driver_comes_in(daemon, ring, detection):
    port = int(daemon.endpoint.rpartition(":")[2]) + 1
    slowest_s = 0.0
    began = time.monotonic()
    seconds: list[tuple[int, int]] = []
    with Flood(port) as flood:
        at = flood.counts
        while time.monotonic() < began + FLOOD_S or not any(map(is_kept_out, seconds)):
            assert time.monotonic() < began + LIMIT_S, seconds
            if time.monotonic() >= began + 1.0 + len(seconds):
                before, at = at, flood.counts
                seconds.append((at[0] - before[0], at[1] - before[1]))
            asked = time.monotonic()
            keys = ring.keys("driver")
            assert ask(daemon.endpoint, keys, lambda client: client.check_health(LIMIT_S).healthy)
            slowest_s = max(slowest_s, time.monotonic() - asked)
    assert flood.num_accepted >= BURST / 2
    detection(37, "flood of connections", 1.0, slowest_s, "accept rate")
    said = "refused at the step socket: unknown addresses: too many connections"
    wait_until(lambda: said in daemon.log.read_text(), "it is logged")
    wait_until(lambda: connects(port, 0.5), "a stranger gets in again")


def is_kept_out(counts: tuple[int, int]) -> bool:
    """Whether in some second few strangers came in, and others did not.

    The ZAP thread learns of a connection a moment after it was accepted, which on a busy host is
    many more connections later: not in every second.
    """
    accepted, refused = counts
    return accepted <= 3 * RATE_PER_S and refused >= 10


def test_connections_that_end_before_they_are_looked_at_are_limited(ring, caplog):
    """The ZAP thread is as late as can be: it is started after them."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listening:
        zap = ZapHandler(context, AuthorizedKeys(ring.authorized), BadPeers())
        zap.watch("step", listening)
        port = listening.bind_to_random_port("tcp://127.0.0.1")
        before = num_descriptors()
        for _ in range(2 * BURST):
            assert connects(port, LIMIT_S)
        wait_until(lambda: num_descriptors() <= before, "libzmq has closed them")
        zap.start()
        wait_until(lambda: "too many connections" in caplog.text, "they are limited", LIMIT_S)
        wait_until(lambda: connects(port, 0.5), "a stranger gets in again")
        assert zap.stop(LIMIT_S)


def num_descriptors():
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Traffics:
    """Stands in for the kernel: what connections have carried, and those that were shut down."""

    def __init__(self) -> None:
        self.carried: dict[int, Traffic] = {}
        self.shut: list[int] = []
        self.friends: set[str] = set()
        self.now = 0.0
        self.handshakes = Handshakes(
            is_trusted=self.friends.__contains__,
            measure=lambda descriptor, name: self.carried.get(descriptor),
            hang_up=lambda descriptor, name: self.shut.append(descriptor),
            clock=lambda: self.now,
        )

    def begin(self, descriptor: int, sent: int, host: str = "10.0.0.1") -> None:
        self.carried[descriptor] = Traffic(sent, 64)
        self.handshakes.began(descriptor, (host, descriptor))


AUTHENTICATED, KNOWS_THE_KEY, GREETED = 301, 234, 64


@pytest.mark.parametrize("sent", [GREETED, KNOWS_THE_KEY])
def test_oldest_handshake_is_shut_down_first_however_far_it_is(sent):
    kernel = Traffics()
    for descriptor in range(3 * MAX_UNKNOWN):
        kernel.begin(descriptor, sent if descriptor % 2 else GREETED)
    assert kernel.shut == list(range(2 * MAX_UNKNOWN))
    assert kernel.handshakes.ended(2) == "too many handshakes are unfinished"
    assert kernel.handshakes.ended(2) == kernel.handshakes.ended(2 * MAX_UNKNOWN) == ""


def test_address_with_most_handshakes_gives_them_up():
    kernel = Traffics()
    kernel.begin(0, KNOWS_THE_KEY, "10.0.0.2")
    for descriptor in range(1, 3 * MAX_UNKNOWN):
        kernel.begin(descriptor, KNOWS_THE_KEY)
    assert kernel.shut == list(range(1, 2 * MAX_UNKNOWN + 1))


def test_handshakes_that_began_before_their_address_was_known_are_those_of_friends():
    kernel = Traffics()
    for descriptor in range(MAX_UNKNOWN):
        kernel.begin(descriptor, GREETED)
    kernel.friends.add("10.0.0.1")
    for descriptor in range(MAX_UNKNOWN, 2 * MAX_UNKNOWN):
        kernel.begin(descriptor, GREETED)
    assert not kernel.shut


def test_finished_handshakes_and_friends_do_not_count():
    kernel = Traffics()
    for descriptor in range(100):
        kernel.begin(descriptor, AUTHENTICATED)
    kernel.friends.add("10.0.0.2")
    for descriptor in range(100, 100 + MAX_UNKNOWN):
        kernel.begin(descriptor, GREETED)
        kernel.begin(descriptor + 100, GREETED, "10.0.0.2")
    assert not kernel.shut
    kernel.carried[100] = Traffic(GREETED, MAX_HANDSHAKE_BYTES + 1)
    kernel.carried[0] = Traffic(AUTHENTICATED, 1 << 30)
    kernel.now = 1.0
    kernel.handshakes.look()
    assert kernel.shut == [100]
    kernel.carried.clear()
    kernel.now = 2.0
    kernel.handshakes.look()
    assert kernel.handshakes.patience_ms is None


def test_friends_are_the_last_addresses():
    friends = TrustedAddresses()
    for number in range(40):
        friends.add(f"10.0.0.{number}")
        friends.add("10.0.0.0")
    for text in ("localhost:1000:1000:42", "", "::1"):
        friends.add(text)
    assert "10.0.0.0" in friends and "10.0.0.39" in friends and "::1" in friends
    assert "10.0.0.2" not in friends and "" not in friends
    assert len(friends.addresses()) == 16


def test_rate_is_that_of_strangers():
    now = [0.0]
    friends = TrustedAddresses()
    friends.add("10.0.0.9")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        turnstile = ConnectionLimit(listener.fileno(), friends, lambda: now[0])
        assert not any(turnstile.entered("10.0.0.1") for _ in range(BURST))
        assert not turnstile.entered("10.0.0.9")
        assert turnstile.entered("10.0.0.1") and turnstile.is_shut
        turnstile.look()
        assert turnstile.is_shut
        now[0] = 1.0
        turnstile.look()
        assert not turnstile.is_shut
        entered = [turnstile.entered("10.0.0.1") for _ in range(int(RATE_PER_S))]
        assert entered == [False] * (len(entered) - 1) + [True]
    now[0] = 9.0
    turnstile.look()
    assert not turnstile.is_shut


def test_socket_is_used_while_no_descriptor_is_free():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (listener.fileno() + 1, hard))
        with suppress(OSError):
            while True:
                held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        with borrowed(listener.fileno()) as same:
            assert same.getsockname() == listener.getsockname()
        assert listener.getsockname()


def test_what_is_no_socket_leaves_no_descriptor_open():
    opened = os.open(os.devnull, os.O_RDONLY)
    before = num_descriptors()
    for _ in range(3):
        with pytest.raises(OSError), borrowed(opened):
            pass
    assert num_descriptors() == before
    os.close(opened)


def test_what_is_no_tcp_socket_is_left_alone():
    with socket.socket(socket.AF_UNIX) as unix:
        turnstile = ConnectionLimit(unix.fileno(), TrustedAddresses())
        assert not any(turnstile.entered("?") for _ in range(BURST + 10))


def run(instructions: list[tuple[int, int, int, int]], header: bytes) -> int:
    """What a filter returns for a packet, by the rules of linux/filter.rst."""
    accumulator = at = 0
    while True:
        code, if_equal, otherwise, value = instructions[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            offset = (value + 0x100000) & 0xFFFFFFFF
            accumulator = int.from_bytes(header[offset : offset + 4], "big")
        else:
            at += if_equal if accumulator == value else otherwise


@pytest.mark.parametrize(
    ("friends", "stranger", "offset"),
    [
        (["10.0.0.1", "10.0.0.2"], "10.0.1.1", 12),
        (["fe80::1", "fe80::1:0:2", "2001:db8::7"], "fe80::1:0:3", 8),
        ([], "10.0.0.1", 12),
    ],
)
def test_filter_keeps_friends_alone(friends, stranger, offset):
    packed = [ipaddress.ip_address(friend).packed for friend in friends]
    made = program(packed, offset)
    for friend in packed:
        assert run(made, bytes(offset) + friend + bytes(20)) == 0xFFFFFFFF
    assert run(made, bytes(offset) + ipaddress.ip_address(stranger).packed + bytes(20)) == 0
