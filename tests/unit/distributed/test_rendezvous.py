"""A rendezvous and gloo's listeners, on real sockets: members read each other's values, and a
stranger gets nothing, whatever it sends or opens."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest
import torch.distributed as dist

from rendezvous.listeners import (
    ListenerWatch,
    end,
    inheritable_connections,
    inheritable_listeners,
)
from rendezvous.store import (
    MAX_STORED_BYTES,
    MAX_UNPROVEN,
    MAX_VALUE_BYTES,
    PROOF_S,
    ImpostorError,
    Member,
    RendezvousError,
    StoreServer,
)
from tests.support.strangers import gets_in
from tests.support.waiting import PATIENCE_S, wait_until

HOST = "127.0.0.1"


@pytest.fixture
def place():
    place = StoreServer(HOST, 2)
    yield place
    place.close()


@contextlib.contextmanager
def member(place, secret=None, within_s=30.0):
    joined = Member(HOST, place.port, secret or place.secret, within_s)
    try:
        yield joined
    finally:
        joined.close()


def raw(place):
    return socket.create_connection((HOST, place.port), 30.0)


def is_hung_up_on(connection, within_s=PROOF_S + 30.0):
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_member_waits_for_what_another_sets(place):
    with member(place) as a, member(place) as b:
        setting = threading.Timer(0.05, a.set, ("key", b"v" * MAX_VALUE_BYTES))
        setting.start()
        assert b.get("key", 30.0) == b"v" * MAX_VALUE_BYTES
        setting.join()
        with pytest.raises(RendezvousError, match=r"'other' was not set within 0\.1 s"):
            b.get("other", 0.1)


def test_threads_share_a_member(place):
    """As torch's own threads may."""

    def ask(name, right):
        for number in range(50):
            joined.set(name, str(number).encode())
            right.append(joined.get(name, 30.0) == str(number).encode())

    with member(place) as joined:
        answers = [[] for _ in range(4)]
        threads = [
            threading.Thread(target=ask, args=(str(index), right))
            for index, right in enumerate(answers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == [[True] * 50] * 4


def test_door_is_shut_once_all_are_here_and_the_place_ends_when_they_have_left(place):
    with member(place), member(place) as b:
        wait_until(lambda: not gets_in((HOST, place.port)), "the door is shut")
        b.set("key", b"value")
        assert place.get("key", 0.0) == b"value"
    wait_until(
        lambda: "rendezvous" not in [thread.name for thread in threading.enumerate()],
        "the thread has ended",
    )


def test_member_that_left_too_early_may_come_again(place):
    for _ in range(3):
        with member(place) as early:
            early.set("key", b"value")
    with member(place) as a, member(place):
        assert a.get("key", 30.0) == b"value"


@pytest.mark.parametrize(
    "words",
    [b"\0" * 63, b"\xff" * 64, b"GET / HTTP/1.1\r\n\r\n" * 99],
    ids=["short", "none", "other"],
)
def test_stranger_learns_nothing_and_is_hung_up_on(place, words):
    with member(place) as guest:
        guest.set("key", b"a secret")
        with raw(place) as stranger:
            stranger.sendall(words)
            nonce = stranger.recv(32)
            assert len(nonce) == 32
            assert is_hung_up_on(stranger)
        assert guest.get("key", 30.0) == b"a secret"


def test_wrong_secret_gets_nobody_in_on_either_side(place):
    with pytest.raises(RendezvousError), member(place, bytes(32), 0.3):
        pass
    with socket.create_server((HOST, 0)) as impostor:
        impostor.settimeout(30.0)
        refused = []

        def join():
            try:
                Member(HOST, impostor.getsockname()[1], place.secret, 30.0)
            except ImpostorError as error:
                refused.append(str(error))

        joining = threading.Thread(target=join)
        joining.start()
        with impostor.accept()[0] as connection:
            connection.sendall(bytes(64))  # a nonce, and a proof that is none
            joining.join()
    assert "does not hold the secret" in refused[0]


def test_frames_of_a_member_cannot_be_forged_or_repeated(place):
    class Recorder(Member):
        def _connect(self, *args):
            super()._connect(*args)
            self.bare = self._connection

    forger = Recorder(HOST, place.port, place.secret, 30.0)
    frame = forger._up.frame(struct.pack("!cH", b"s", 3) + b"keyvalue")
    forger.bare.sendall(frame)
    wait_until(lambda: place.has(["key"]), "the true frame counts")
    place.forget(["key"])
    forger.bare.sendall(frame)  # the same bytes again
    assert is_hung_up_on(forger.bare)
    assert not place.has(["key"])
    forger.close()


def test_those_without_a_proof_are_few_and_keep_no_member_out(place):
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(raw(place)) for _ in range(4 * MAX_UNPROVEN)]
        with member(place) as guest:
            guest.set("key", b"value")
        assert len(place._visitors) <= MAX_UNPROVEN + 1
        assert all(is_hung_up_on(stranger) for stranger in strangers)


def test_what_a_member_stores_is_bounded(place):
    with member(place) as guest:
        with pytest.raises(RendezvousError, match="too long"):
            guest.set("key", bytes(MAX_VALUE_BYTES + 1))
        with pytest.raises(RendezvousError, match="no room left"):
            for number in range(MAX_STORED_BYTES // MAX_VALUE_BYTES + 1):
                guest.set(f"key{number}", bytes(MAX_VALUE_BYTES))
        guest.set("key0", bytes(MAX_VALUE_BYTES))  # in the place of another
        place.forget([f"key{number}" for number in range(10)])
        guest.set("key", b"value")


def test_closing_frees_whoever_waits(place):
    with member(place) as guest:
        closing = threading.Timer(0.1, place.close)
        closing.start()
        began = time.monotonic()
        with pytest.raises(RendezvousError):
            guest.get("key", 30.0)
        assert time.monotonic() - began < 10.0
        closing.join()


def test_listeners_of_gloo_are_shut_at_the_end_of_a_meeting():
    with ListenerWatch() as watch:
        before = inheritable_listeners()
        device = dist.ProcessGroupGloo.create_device(hostname=HOST)
        address = listener_since(before)
        assert gets_in(address)
    assert not watch.is_flooded
    assert not gets_in(address)
    del device


def test_flood_shuts_them_before_gloo_runs_out_of_descriptors():
    with contextlib.ExitStack() as stack, ListenerWatch(max_strays=100) as watch:
        before = inheritable_listeners()
        device = dist.ProcessGroupGloo.create_device(hostname=HOST)
        address = listener_since(before)
        for _ in range(120):
            with contextlib.suppress(TimeoutError):
                stack.enter_context(socket.create_connection(address, 0.2))
        wait_until(lambda: watch.is_flooded, "the flood was seen")
        assert not gets_in(address)
    del device


def test_connections_end_on_both_sides_and_no_other_socket_of_that_number():
    with socket.create_server((HOST, 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        accepted = [listener.accept()[0] for _ in ends]
        listener.set_inheritable(True)
        for own in ends:
            own.set_inheritable(True)
        found = {(own.fileno(), os.fstat(own.fileno()).st_ino) for own in ends}
        assert found <= inheritable_connections()
        assert listener.fileno() not in {descriptor for descriptor, _ in inheritable_connections()}
        accepted[0].sendall(b"sent before")
        successor = (ends[1].fileno(), 0)  # as if another socket had got the descriptor
        end(frozenset({(ends[0].fileno(), os.fstat(ends[0].fileno()).st_ino), successor}))
        assert ends[0].recv(99) + ends[0].recv(99) == b"sent before"
        assert accepted[0].recv(99) == b""
        ends[1].sendall(b"still open")
        assert accepted[1].recv(99) == b"still open"
        for own in ends + accepted:
            own.close()


def listener_since(before):
    ((descriptor, _),) = inheritable_listeners() - before
    listener = socket.socket(fileno=descriptor)
    try:
        return listener.getsockname()
    finally:
        listener.detach()


def test_meeting_whose_listeners_are_not_found_is_told(caplog):
    with ListenerWatch():
        pass
    assert "any host can still connect" in caplog.text
