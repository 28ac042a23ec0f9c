"""A driver sends nothing to a daemon that another user could have started."""

import os
import socket
from pathlib import Path

import pytest
import zmq

from rpc_schema.config import ParallelConfig
from tests.support.command_line import short_directory
from worker_client.errors import NothingListens, UntrustedEndpointError
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.ipc_owner import check_owner
from worker_client.wire.worker_client import AskingClient
from worker_client.worker_group import WorkerGroup

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for other users' files")


def listening(path: Path) -> socket.socket:
    """A socket there that would hear a Hello."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    made.setblocking(False)
    return made


def heard(listener: socket.socket) -> bytes:
    """Return the bytes that a peer sent."""
    said = b""
    while True:
        try:
            peer, _ = listener.accept()
            with peer:
                said += peer.recv(1 << 16)
        except BlockingIOError:
            return said


@pytest.fixture
def endpoint():
    """A safe directory with a socket in it."""
    directory = short_directory() / "d"
    directory.mkdir(0o700)
    with listening(directory / "w0") as listener:
        yield f"ipc://{directory}/w0", directory, listener


def test_own_socket_in_an_own_directory_is_trusted(endpoint):
    check_owner(endpoint[0])


def test_what_is_not_there_yet_is_not_judged(tmp_path):
    check_owner(f"ipc://{tmp_path}/none/w0")


@needs_root
@pytest.mark.parametrize("foreign", ["w0", ".", ".."])
def test_socket_or_directory_of_another_user_hears_nothing(endpoint, foreign):
    address, directory, listener = endpoint
    os.chown(directory / foreign, NOBODY, NOBODY)
    with pytest.raises(
        UntrustedEndpointError, match=rf"user {NOBODY}.*fix: use a private directory"
    ):
        WorkerGroup([address], ParallelConfig()).attach(timeout_s=2)
    assert not heard(listener)


@pytest.mark.parametrize("place", [".", ".."])
def test_directory_in_which_others_may_rename_hears_nothing(endpoint, place):
    address, directory, listener = endpoint
    (directory / place).chmod(0o777)
    with pytest.raises(UntrustedEndpointError, match=r"mode 0777|may rename"):
        WorkerGroup([address], ParallelConfig()).attach(timeout_s=2)
    assert not heard(listener)


def test_squatter_that_comes_after_we_began_to_connect_hears_no_hello(endpoint):
    """The directory was not there when the sockets were connected."""
    late = endpoint[1] / "late"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = AskingClient(context, parse_endpoint(f"ipc://{late}/w0"), 0, new_driver_id())
    squatter = context.socket(zmq.ROUTER)
    try:
        with pytest.raises(NothingListens):
            client.hello(0.1)
        late.mkdir()
        late.chmod(0o777)
        squatter.bind(f"ipc://{late}/w0")
        with pytest.raises(UntrustedEndpointError, match="mode 0777"):
            client.hello(10.0)
        assert not squatter.poll(50)
    finally:
        client.close()
        squatter.close(linger=0)
        context.term()
