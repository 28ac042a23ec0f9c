"""A rendezvous: a small key-value store over TCP at which the ranks of a link, or a trainer and its
workers, exchange addresses. It serves only peers that prove that they hold its secret: other peers
cannot read it, write it, or make it grow.

A connection starts with a nonce and a proof from each side. After that, each frame carries a MAC
that only a holder of the secret can compute. Nothing is encrypted.
"""

import contextlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Final

SECRET_BYTES: Final = 32
MAX_KEY_BYTES: Final = 512
MAX_VALUE_BYTES: Final = 1 << 16
MAX_STORED_BYTES: Final = 16 << 20
MAX_UNPROVEN: Final = 16
"""Limit on connections without a proof; above it, the oldest is closed."""
PROOF_S: Final = 2.0
"""Limit on the time of a connection without a proof."""

_NONCE = _CODE = 32
_LENGTH: Final = struct.Struct("!I")
_REQUEST: Final = struct.Struct("!cH")
_COUNTER: Final = struct.Struct("!Q")
_SET, _GET, _REFUSED, _OK = b"s", b"g", b"r", b"o"
_MAX_BODY: Final = _REQUEST.size + MAX_KEY_BYTES + MAX_VALUE_BYTES
_RETRY_S: Final = 0.05
_PAUSE_S: Final = 0.05
_READ_BYTES: Final = 1 << 16


class RendezvousError(Exception):
    """The rendezvous cannot be reached, is closed, or the peer does not hold its secret."""


class ImpostorError(RendezvousError):
    """The listener at that address does not hold the secret."""


def new_secret() -> bytes:
    """Return the secret of a new rendezvous."""
    return secrets.token_bytes(SECRET_BYTES)


def proof(secret: bytes, *parts: bytes) -> bytes:
    """Return the 32-byte MAC of `parts`, which only a holder of the secret can compute."""
    framed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.digest(secret, framed, "sha256")


def member_proof(secret: bytes, group: str, sender: int, receiver: int) -> bytes:
    """Return a member's proof of identity for another member of its group."""
    return proof(secret, f"{group} {sender} {receiver}".encode())


class _Codes:
    """The MACs of one direction of a connection, in order."""

    def __init__(self, secret: bytes, direction: bytes, nonces: bytes) -> None:
        self._key = proof(secret, direction, nonces)
        self._count = 0

    def next(self, body: bytes) -> bytes:
        self._count += 1
        return proof(self._key, _COUNTER.pack(self._count), body)

    def frame(self, body: bytes) -> bytes:
        return _LENGTH.pack(len(body)) + body + self.next(body)


class _Store:
    """Values by key, bounded; any thread may use it."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises RendezvousError if the store would be too large."""
        with self._changed:
            size = len(key) + len(value)
            if len(value) > MAX_VALUE_BYTES:
                raise RendezvousError(f"the value of {key!r} is too long for the rendezvous")
            replaced = len(key) + len(self._values[key]) if key in self._values else 0
            if self._num_bytes - replaced + size > MAX_STORED_BYTES:
                raise RendezvousError(f"the rendezvous has no room left for {key!r}")
            self._remove(key)
            self._values[key] = value
            self._num_bytes += size
            self._changed.notify_all()

    def find(self, key: str) -> bytes | None:
        with self._changed:
            return self._values.get(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or key in self._values, timeout_s):
                raise RendezvousError(f"{key!r} was not set within {timeout_s:g} s")
            if key not in self._values:
                raise RendezvousError("the rendezvous is closed")
            return self._values[key]

    def has(self, keys: Iterable[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def forget(self, keys: Iterable[str]) -> None:
        with self._changed:
            for key in keys:
                self._remove(key)

    def forget_under(self, prefix: str) -> None:
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                self._remove(key)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _remove(self, key: str) -> None:
        if (old := self._values.pop(key, None)) is not None:
            self._num_bytes -= len(key) + len(old)


class _Visitor:
    """One connection on the server's side. Serving thread only."""

    def __init__(self, connection: socket.socket, secret: bytes) -> None:
        self.connection = connection
        self.is_proven = False
        self.arrived_at = time.monotonic()
        self.awaited: str | None = None
        """The key whose value it waits for."""
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._received = bytearray()
        self._up: _Codes
        self._down: _Codes
        connection.setblocking(False)
        self._send(self._nonce)

    def read(self, store: _Store) -> None:
        """Process received data. Raises OSError or RendezvousError if the connection must be
        closed."""
        data = self.connection.recv(_READ_BYTES if self.is_proven else _NONCE + _CODE)
        if not data:
            raise RendezvousError("it has closed the connection")
        self._received += data
        if not self.is_proven:
            self._take_proof()
        while (body := self._take_frame()) is not None:
            self._answer(body, store)

    def look(self, store: _Store) -> None:
        """Answer a waiting request if its value has been set."""
        if self.awaited is not None and (value := store.find(self.awaited)) is not None:
            self.awaited = None
            self._send(self._down.frame(_OK + value))

    def _take_proof(self) -> None:
        if len(self._received) < _NONCE + _CODE:
            return
        nonces = self._nonce + bytes(self._received[:_NONCE])
        code = bytes(self._received[_NONCE:])
        if not hmac.compare_digest(code, proof(self._secret, b"member", nonces)):
            raise RendezvousError("it does not hold the secret")
        self._received.clear()
        self.is_proven = True
        self._up = _Codes(self._secret, b"up", nonces)
        self._down = _Codes(self._secret, b"down", nonces)
        self._send(proof(self._secret, b"place", nonces))

    def _take_frame(self) -> bytes | None:
        """Return the body of the next complete frame."""
        if not self.is_proven or len(self._received) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._received)
        if size > _MAX_BODY:
            raise RendezvousError("its frame is too long")
        end = _LENGTH.size + size
        if len(self._received) < end + _CODE:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        code = bytes(self._received[end : end + _CODE])
        del self._received[: end + _CODE]
        if not hmac.compare_digest(code, self._up.next(body)):
            raise RendezvousError("its frame was forged")
        return body

    def _answer(self, body: bytes, store: _Store) -> None:
        operation, key_size = _REQUEST.unpack_from(body)
        end = _REQUEST.size + key_size
        key = body[_REQUEST.size : end].decode()
        if operation == _GET:
            self.awaited = key
            self.look(store)
            return
        try:
            store.set(key, body[end:])
        except RendezvousError as error:
            self._send(self._down.frame(_REFUSED + str(error).encode()))
        else:
            self._send(self._down.frame(_OK))

    def _send(self, data: bytes) -> None:
        """Send a reply. It fits the socket's buffer, since a member reads each reply before its
        next request."""
        if self.connection.send(data) != len(data):
            raise RendezvousError("it does not read")


class StoreServer:
    """Serves one rendezvous on a separate thread: accepts connections until all members have
    connected and proved that they hold the secret, then stops listening, and ends once they have
    left. Any thread may use it."""

    def __init__(self, host: str, num_members: int, secret: bytes | None = None) -> None:
        """Listen on a free port of host, an IPv4 or IPv6 address. num_members: number of
        connections with a proof that completes the rendezvous.

        Raises:
            OSError: the address is not one of this host's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host = host
        self.secret = secret or new_secret()
        self._store = _Store()
        self._num_members = num_members
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._closing = threading.Event()
        self._listener: socket.socket | None = socket.create_server(
            (host, 0), family=family, backlog=128
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wakeup, self._wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        """Set a value, as a member would. Raises RendezvousError: it is too long."""
        self._store.set(key, value)
        self._wake()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value. Raises RendezvousError: it was not set in time, or the rendezvous is
        closed."""
        return self._store.get(key, timeout_s)

    def has(self, keys: Iterable[str]) -> bool:
        """Return True if all these keys are set."""
        return self._store.has(keys)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove these keys."""
        self._store.forget(keys)

    def forget_under(self, prefix: str) -> None:
        """Remove all keys that begin so."""
        self._store.forget_under(prefix)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._closing.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: already signaled; closed: the server has ended
            self._wakeup.send(b"\0")

    def _serve(self) -> None:
        try:
            while not self._closing.is_set() and (self._listener is not None or self._visitors):
                self._poll()
        finally:
            self._store.close()
            for visitor in list(self._visitors):
                self._close_connection(visitor)
            self._stop_listening()
            self._selector.close()
            self._wakeup.close()
            self._wakeup_end.close()

    def _poll(self) -> None:
        for key, _ in self._selector.select(self._select_timeout_s()):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._accept()
            elif connection is self._wakeup_end:
                connection.recv(_READ_BYTES)
            elif connection in self._visitors:  # not closed in this iteration
                self._read(connection)
        self._answer_waiting()
        self._close_late()

    def _select_timeout_s(self) -> float | None:
        return (
            PROOF_S / 4
            if any(not visitor.is_proven for visitor in self._visitors.values())
            else None
        )

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: close the connections without a proof
            self._make_room(0)
            time.sleep(_PAUSE_S)
            return
        self._make_room(MAX_UNPROVEN - 1)
        try:
            self._visitors[connection] = _Visitor(connection, self.secret)
        except (OSError, RendezvousError):
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self, limit: int) -> None:
        """Keep no more than the newest `limit` connections without a proof."""
        unproven = [each for each, visitor in self._visitors.items() if not visitor.is_proven]
        for connection in unproven[: max(0, len(unproven) - limit)]:
            self._close_connection(connection)

    def _read(self, connection: socket.socket) -> None:
        visitor = self._visitors[connection]
        was_proven = visitor.is_proven
        try:
            visitor.read(self._store)
        except (OSError, RendezvousError, ValueError, struct.error):
            self._close_connection(connection)
        if visitor.is_proven and not was_proven and self._is_complete():
            self._make_room(0)
            self._stop_listening()

    def _is_complete(self) -> bool:
        return sum(visitor.is_proven for visitor in self._visitors.values()) == self._num_members

    def _answer_waiting(self) -> None:
        for connection, visitor in list(self._visitors.items()):
            try:
                visitor.look(self._store)
            except (OSError, RendezvousError):
                self._close_connection(connection)

    def _close_late(self) -> None:
        before = time.monotonic() - PROOF_S
        for connection, visitor in list(self._visitors.items()):
            if not visitor.is_proven and visitor.arrived_at < before:
                self._close_connection(connection)

    def _close_connection(self, connection: socket.socket) -> None:
        del self._visitors[connection]
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        connection.close()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None


class Member:
    """A connection to a rendezvous server. Any thread may use it, one at a time."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        """Connect and exchange proofs; try again if the server is too busy.

        Raises:
            RendezvousError: no holder of the secret answers there within timeout_s.
        """
        self._asking = threading.Lock()
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._connect(host, port, secret, max(_RETRY_S, deadline - time.monotonic()))
            except ConnectionRefusedError as error:
                raise RendezvousError(f"nothing listens there: {error}") from error
            except ImpostorError:
                raise
            except (OSError, RendezvousError) as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise RendezvousError(f"no rendezvous server answers: {error}") from error
                time.sleep(_RETRY_S)
            else:
                return

    def set(self, key: str, value: bytes) -> None:
        """Set a value. Raises RendezvousError: it is too long, or the rendezvous is closed."""
        self._ask(_SET, key, value, PROOF_S)

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait for a value. Raises RendezvousError: it was not set in time, or the rendezvous is
        closed; after that the connection is unusable."""
        return self._ask(_GET, key, b"", timeout_s)

    def close(self) -> None:
        """Leave. Idempotent."""
        self._connection.close()

    def _connect(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        # bytes: for a str, Python would first load a codec.
        address = (host.encode(), port)
        connection = socket.create_connection(
            address,  # type: ignore[arg-type]  # typeshed leaves bytes out
            timeout_s,
        )
        try:
            connection.settimeout(min(timeout_s, PROOF_S))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
            own = secrets.token_bytes(_NONCE)
            nonces = self._receive(_NONCE) + own
            connection.sendall(own + proof(secret, b"member", nonces))
            if not hmac.compare_digest(self._receive(_CODE), proof(secret, b"place", nonces)):
                raise ImpostorError("the listener there does not hold the secret")
        except BaseException:
            connection.close()
            raise
        self._up = _Codes(secret, b"up", nonces)
        self._down = _Codes(secret, b"down", nonces)

    def _ask(self, operation: bytes, key: str, value: bytes, timeout_s: float) -> bytes:
        name = key.encode()
        if len(name) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            raise RendezvousError(f"{key[:64]!r} is too long for the rendezvous")
        request = _REQUEST.pack(operation, len(name)) + name + value
        with self._asking:
            return self._exchange(request, key, timeout_s)

    def _exchange(self, request: bytes, key: str, timeout_s: float) -> bytes:
        try:
            self._connection.settimeout(max(timeout_s, _RETRY_S))
            self._connection.sendall(self._up.frame(request))
            (size,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            if size > _MAX_BODY:
                raise RendezvousError("the rendezvous server sends too much")
            body, code = self._receive(size), self._receive(_CODE)
        except TimeoutError as error:
            self.close()
            raise RendezvousError(f"{key!r} was not set within {timeout_s:g} s") from error
        except OSError as error:
            raise RendezvousError(f"the connection to the rendezvous is lost: {error}") from error
        if not hmac.compare_digest(code, self._down.next(body)):
            raise RendezvousError("a reply of the rendezvous was forged")
        if body[:1] != _OK:
            raise RendezvousError(body[1:].decode(errors="replace"))
        return body[1:]

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise RendezvousError("the rendezvous server has closed the connection")
            data += part
        return bytes(data)
