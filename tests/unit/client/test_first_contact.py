"""First contact with a daemon that is missing, ends before it answers, or starts later: on
real sockets, of processes that are stopped and killed."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.codec import DRIVER_OPERATIONS
from rpc_schema.config import ParallelConfig
from rpc_schema.version import PROTOCOL_VERSION
from tests.support.command_line import run_client, start_client
from tests.support.fake_daemon import FakeDaemon
from tests.support.stopping import stop_process
from tests.support.waiting import wait_until
from tests.unit.server.driver import DaemonProcess
from worker_client.cli.daemons import connect
from worker_client.errors import NothingListens, WorkerDied
from worker_client.wire.control_channel import ControlChannel
from worker_client.wire.endpoint import Endpoint
from worker_client.wire.listener import Listener
from worker_client.wire.processes import connection_error, nobody_listens
from worker_client.worker_group import WorkerGroup

AT_ONCE_S = 10.0
"""However busy the host is; answers are waited for three times as long."""


def attach(endpoint: str) -> None:
    with WorkerGroup([endpoint], ParallelConfig()) as group:
        group.attach()


def ask(endpoint: str) -> None:
    with connect([endpoint]) as (client,):
        client.hello(3 * AT_ONCE_S)


def call(address: str, timeout_s: float) -> None:
    """Over one socket, without keys."""
    with zmq.Context() as context:
        channel = ControlChannel(context, Endpoint(address, "", "", ""), 0, DRIVER_OPERATIONS)
        with closing(channel):
            channel.send(lambda call: lc.GetStatus(call=call), timeout_s).result()


FIRST_WORDS = pytest.mark.parametrize("say", [attach, ask])


def seconds_of(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


@FIRST_WORDS
def test_missing_daemon_is_told_at_once_with_what_to_do(directory, say):
    endpoint = f"ipc://{directory}/w0"

    def say_it() -> None:
        with pytest.raises(NothingListens, match="the socket is missing") as caught:
            say(endpoint)
        assert f"fix: start it (worker-daemon serve --endpoint {endpoint})" in str(caught.value)

    assert seconds_of(say_it) < AT_ONCE_S


@FIRST_WORDS
def test_daemon_killed_before_it_answers_is_told_at_once(directory, say, monkeypatch):
    """It is stopped as soon as it listens, so that no handshake is done, and killed once it was
    seen to listen."""
    daemon = DaemonProcess(directory / "d")

    def look_and_kill(address: str) -> OSError | None:
        error = connection_error(address)
        daemon.process.kill()
        return error

    monkeypatch.setattr("worker_client.wire.listener.connection_error", look_and_kill)
    try:
        wait_until(Path(daemon.endpoint.removeprefix("ipc://")).exists, "it listens", 20.0)
        stop_process(daemon.process.pid)

        def say_it() -> None:
            with pytest.raises(WorkerDied, match=rf"{daemon.endpoint}: .*\(signal: \w+\)"):
                say(daemon.endpoint)

        assert seconds_of(say_it) < AT_ONCE_S
    finally:
        daemon.stop()
    with pytest.raises(NothingListens, match="connections are refused"):
        say(daemon.endpoint)  # its socket has stayed


@pytest.mark.parametrize("listens", [False, True])
def test_host_that_refuses_is_told_at_once(listens):
    """Over tcp; what listened accepts nothing, and is closed while its answer is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        if listens:
            timer = threading.Timer(0.5, listener.close)
            timer.start()
        else:
            listener.close()
        with pytest.raises(WorkerDied, match="connections are refused"):
            call(address, 3 * AT_ONCE_S)
        if listens:
            timer.join()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_host_that_does_not_resolve_is_told_at_once(host):
    endpoint = f"tcp://{host}:5555"

    def say_it() -> None:
        with pytest.raises(NothingListens, match="its host name does not resolve") as caught:
            call(endpoint, 10 * AT_ONCE_S)
        assert "fix: name a host that resolves here" in str(caught.value)

    assert seconds_of(say_it) < 3 * AT_ONCE_S  # a resolver that hears nothing asks again


@contextmanager
def unprivileged():
    """No superuser, whom nothing is forbidden."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@FIRST_WORDS
def test_socket_that_may_not_be_connected_to_is_told_at_once(directory, say):
    endpoint = f"ipc://{directory}/w0"
    daemon = FakeDaemon(endpoint)
    daemon.start()
    directory.chmod(0o755)
    (directory / "w0").chmod(0)

    def say_it() -> None:
        with unprivileged(), pytest.raises(NothingListens, match="no permission") as caught:
            say(endpoint)
        assert "fix: run as the daemon's user" in str(caught.value)

    try:
        assert seconds_of(say_it) < AT_ONCE_S
    finally:
        daemon.stop()


@pytest.mark.parametrize(
    "failure", [socket.gaierror(socket.EAI_AGAIN, "again"), PermissionError(13, "denied")]
)
def test_daemon_once_met_is_not_lost_by_a_failure_to_look_for_it(directory, monkeypatch, failure):
    listener = Listener(f"ipc://{directory}/w0", 0)
    listener.is_there()
    monkeypatch.setattr("worker_client.wire.listener.connection_error", lambda _: failure)
    listener.check()
    monkeypatch.setattr("worker_client.wire.processes.connection_error", lambda _: failure)
    assert not nobody_listens(f"ipc://{directory}/w0")


def test_driver_waits_for_a_daemon_that_is_started_later(directory):
    endpoint = f"ipc://{directory}/w0"
    daemon = FakeDaemon(endpoint)
    timer = threading.Timer(0.5, daemon.start)
    with WorkerGroup([endpoint], ParallelConfig()) as group:
        timer.start()
        (status,) = group.attach(wait_s=3 * AT_ONCE_S)
    assert status.load == "CREATED"
    timer.join()
    daemon.stop()


def test_shutdown_ends_no_daemon_if_one_has_another_version(directory):
    own = FakeDaemon(f"ipc://{directory}/w0").start()
    other = FakeDaemon(f"ipc://{directory}/w1", version=PROTOCOL_VERSION + 1).start()
    words = ("shutdown", "--endpoints", f"{own.endpoint},{other.endpoint}")
    done = run_client(directory, *words, check=False)
    assert done.returncode == 2
    assert f"version {PROTOCOL_VERSION + 1}, this driver {PROTOCOL_VERSION}" in done.stderr
    for daemon in (own, other):
        assert daemon.is_running
        daemon.stop()


class LateDaemon(FakeDaemon):
    """Listens at once, and answers some time after the first request, as one that imports torch."""

    def _on_control(self, frames: list[bytes]) -> None:
        if not self.answers:
            time.sleep(2.5)
            self.answers = True
        super()._on_control(frames)

    answers = False


def attach_waiting(endpoint: str) -> None:
    with WorkerGroup([endpoint], ParallelConfig()) as group:
        group.attach(wait_s=3 * AT_ONCE_S)


def connect_waiting(endpoint: str) -> None:
    with connect([endpoint], wait_s=3 * AT_ONCE_S) as (client,):
        client.hello()


@pytest.mark.parametrize("say", [attach_waiting, connect_waiting])
def test_wait_covers_the_answer_of_a_daemon_that_listens(directory, say, monkeypatch):
    monkeypatch.setattr("worker_client.wire.health_client.CONTROL_TIMEOUT_S", 2.0)
    monkeypatch.setattr("worker_client.group.attaching.ATTACH_TIMEOUT_S", 2.0)
    daemon = LateDaemon(f"ipc://{directory}/w0").start()
    say(daemon.endpoint)
    daemon.stop()


def test_commands_tell_of_a_missing_daemon_and_wait_for_one_if_told_to(directory):
    daemon = FakeDaemon(f"ipc://{directory}/w0")
    endpoints = ("--endpoints", daemon.endpoint)
    done = run_client(directory, "status", *endpoints, check=False)
    assert done.returncode == 2
    assert "nothing listens there: the socket is missing" in done.stderr
    waiting = [
        start_client(directory, *command, *endpoints, "--wait", 3 * AT_ONCE_S)
        for command in (("status",), ("top", "--once"))
    ]
    time.sleep(1.5)  # about as long as they take to begin
    daemon.start()
    for process in waiting:
        said, _ = process.communicate(timeout=6 * AT_ONCE_S)
        assert process.returncode == 0 and "CREATED" in said
    daemon.stop()
