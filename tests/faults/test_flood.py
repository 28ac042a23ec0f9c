"""A flood of connections from strangers on tcp (row 37 of the fault matrix): beyond a rate the
kernel drops them before anybody reads a byte, and a driver comes in all the same."""

import errno
import ipaddress
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.support.command_line import short_directory
from tests.support.secured import KeyRing, SecuredDaemon, ask, free_port, wait_until
from worker_daemon.server.turnstile import BURST, RATE_PER_S, Friends, Turnstile, program

STRANGER, FRIEND = "127.0.0.3", "127.0.0.1"
"""Two hosts, as far as the daemon can see; drivers come from the second."""
FLOOD_S = 3.0
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def ring(directory: Path) -> KeyRing:
    return KeyRing(directory / "keys")


@pytest.fixture
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
    """Whether somebody gets a connection."""
    with socket.socket() as stranger:
        stranger.settimeout(within_s)
        stranger.bind((source, 0))
        try:
            stranger.connect(("127.0.0.1", port))
        except OSError as error:
            assert isinstance(error, TimeoutError) or error.errno == errno.ECONNRESET
            return False
    return True


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
    said = "refused at the step socket: strangers: there are too many"
    wait_until(lambda: said in daemon.log.read_text())
    wait_until(lambda: connects(port, 0.5))


def is_kept_out(counts: tuple[int, int]) -> bool:
    """Whether in some second few strangers came in, and others did not.

    The door's thread hears of a connection a moment after it was accepted, which on a busy host is
    many more connections later: not in every second.
    """
    accepted, refused = counts
    return accepted <= 3 * RATE_PER_S and refused >= 10


def test_friends_are_the_last_addresses():
    friends = Friends()
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
    friends = Friends()
    friends.add("10.0.0.9")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        turnstile = Turnstile(listener.fileno(), friends, lambda: now[0])
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


def test_what_is_no_tcp_socket_is_left_alone():
    with socket.socket(socket.AF_UNIX) as unix:
        turnstile = Turnstile(unix.fileno(), Friends())
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
