"""The driver's sockets by themselves: a dead daemon's step socket, and events that nobody reads."""

import contextlib
import socket
import threading
from pathlib import Path

import pytest
import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.codec import DRIVER_OPERATIONS, decode_control, encode_control
from worker_client.errors import AuthenticationError, DeadlineExceeded, WorkerDied
from worker_client.wire.control_channel import ControlChannel
from worker_client.wire.endpoint import parse_endpoint
from worker_client.wire.transport import StepChannel
from worker_client.wire.worker_client import AskingClient


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


def test_a_request_that_nobody_takes_asks_who_died(context, directory, monkeypatch):
    def check_deaths() -> None:
        raise WorkerDied(3, "there")

    monkeypatch.setattr("worker_client.wire.transport.CONNECT_TIMEOUT_S", 0.1)
    endpoint = parse_endpoint(f"ipc://{directory}/w0")
    for check, rank in ((check_deaths, 3), (lambda: None, 7)):
        channel = StepChannel(context, endpoint, 7, check)
        with pytest.raises(WorkerDied) as caught:
            channel.send([b"x"])
        assert caught.value.rank == rank
        channel.close()


def test_daemon_that_does_not_answer_has_not_refused(context, directory):
    """A busy daemon answers handshakes late, a dying one never: neither is about keys."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{directory}/w0")
        silent.listen()
        channel = ControlChannel(
            context, parse_endpoint(f"ipc://{directory}/w0"), 0, DRIVER_OPERATIONS
        )
        with pytest.raises(DeadlineExceeded):
            channel.send(lambda call: lc.GetStatus(call=call), 2.2).result()
        channel.close()


def test_daemon_that_hangs_up_in_some_handshakes_has_not_refused(context, directory, monkeypatch):
    monkeypatch.setattr("worker_client.wire.sockets.CUT_OFF_S", 60.0)  # however busy the host is
    address = Path(f"{directory}/w0")
    with socket.socket(socket.AF_UNIX) as hanging_up, context.socket(zmq.ROUTER) as daemon:
        daemon.linger = 0
        hanging_up.bind(str(address))
        hanging_up.listen()
        hanging_up.settimeout(30.0)

        def hang_up():
            for _ in range(3):
                hanging_up.accept()[0].close()
            daemon.bind(f"ipc://{address}.new")
            Path(f"{address}.new").rename(address)  # at no moment is nothing there
            hanging_up.close()  # and on whoever has come in the meantime

        thread = threading.Thread(target=hang_up)
        thread.start()
        channel = ControlChannel(context, parse_endpoint(f"ipc://{address}"), 0, DRIVER_OPERATIONS)
        channel.send(lambda call: lc.GetStatus(call=call), 30.0)
        thread.join()
        assert daemon.poll(30_000)
        channel.close()


def test_daemon_that_hangs_up_in_every_handshake_has_refused(context, directory):
    with socket.socket(socket.AF_UNIX) as hanging_up:
        hanging_up.bind(f"{directory}/w0")
        hanging_up.listen()
        hanging_up.settimeout(0.05)
        ended = threading.Event()

        def hang_up():
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    hanging_up.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        channel = ControlChannel(
            context, parse_endpoint(f"ipc://{directory}/w0"), 0, DRIVER_OPERATIONS
        )
        with pytest.raises(AuthenticationError, match="requires keys"):
            channel.send(lambda call: lc.GetStatus(call=call), 5.0).result()
        channel.close()
        ended.set()
        thread.join()


def test_connection_that_ends_while_a_request_is_about_to_leave(context, directory, monkeypatch):
    """As a daemon's does that is killed: the request waits for the next one."""
    daemon, address = context.socket(zmq.ROUTER), f"ipc://{directory}/w0"
    daemon.bind(address)
    channel = ControlChannel(context, parse_endpoint(address), 0, DRIVER_OPERATIONS)
    successors = []

    def end_once(self) -> None:
        if not successors:
            daemon.close(linger=0)
            while self._socket.poll(0, zmq.POLLOUT):
                pass
            successors.append(context.socket(zmq.ROUTER))
            successors[0].bind(address)

    monkeypatch.setattr(ControlChannel, "_check_owner", end_once)
    channel.send(lambda call: lc.GetStatus(call=call), 30.0)
    assert successors[0].poll(30_000)
    channel.close()
    successors[0].close(linger=0)


@pytest.mark.parametrize("replies", [True, False], ids=["replies", "does not reply"])
def test_daemon_that_ends_before_its_reply_is_read_has_shut_down(context, directory, replies):
    """As on a busy host, between a look for the reply and a look for the daemon's end."""
    daemon, path = context.socket(zmq.ROUTER), Path(f"{directory}/w0")
    daemon.bind(f"ipc://{path}")

    def end() -> None:
        if daemon.closed or not daemon.poll(0):
            return
        route, request = daemon.recv_multipart()
        reply = lc.Acknowledged(call=decode_control([request]).call)
        if replies:
            daemon.send_multipart([route, encode_control(reply)])
        daemon.close(linger=1000)
        while client._control._socket.poll(0, zmq.POLLOUT):
            pass
        path.unlink(missing_ok=True)

    client = AskingClient(context, parse_endpoint(f"ipc://{path}"), 0, bytes(16), end)
    client.shutdown()
    assert daemon.closed
    with pytest.raises(WorkerDied):
        client.get_status()
    client.close()
