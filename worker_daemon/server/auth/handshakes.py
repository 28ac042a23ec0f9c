"""Limits unfinished handshakes at one tcp socket: their number, and the bytes of each. A connection
over a limit is shut down. Used by the ZAP thread.

libzmq limits the frames of a handshake only by ZMQ_MAXMSGSIZE, which must allow the largest
message, and does not report the end of a handshake. TCP_INFO reports the bytes in each direction: a
peer without an authorized key receives only a greeting, WELCOME and an error.
"""

import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from rendezvous.borrowed_sockets import borrowed

MAX_UNKNOWN: Final = 8
"""Unfinished handshakes from unknown addresses at a socket."""
MAX_TRUSTED: Final = 64
"""Unfinished handshakes from addresses from which an authorized key has connected."""
MAX_HANDSHAKE_BYTES: Final = 4096
"""Limit of a handshake's bytes; a driver's has about 600 (ZeroMQ RFC 26)."""
MAX_LISTENER_BYTES: Final = 4096
"""Total bytes that a peer of the events socket may send: a handshake and some subscriptions."""

LOOK_S: Final = 0.005
"""Interval of the checks of unfinished handshakes."""
LISTENER_LOOK_S: Final = 0.05
"""Interval of the checks of peers of the events socket, later than YOUNG_S after their
handshake."""
YOUNG_S: Final = 3.0
"""For this time after a handshake, a peer of the events socket is checked as often as during it."""
_HAS_WELCOME: Final = 64 + 170
"""Bytes of greeting and WELCOME: a peer that has received them had the daemon's public key."""
_SENT_INITIATE: Final = 64 + 202 + 259
"""Greeting, HELLO and the shortest INITIATE: libzmq may ask for authentication of a peer that has
sent these."""
_HAS_READY: Final = _HAS_WELCOME + 12 + 1
"""More than a refused key receives, an error of 12 bytes; READY has at least 60."""
_TRAFFIC: Final = struct.Struct("=120xQQ")
"""tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info (Linux 4.2)."""

PeerName: TypeAlias = tuple[str, int]
"""Address and port."""


class Traffic(NamedTuple):
    """Bytes that a connection has carried."""

    sent: int
    """Bytes sent that the peer has acknowledged."""
    received: int


@dataclass(slots=True)
class _Connection:
    name: PeerName
    keys: set[str] = field(default_factory=set)
    """Public keys that connected from its address during its handshake; one is the peer's."""
    young_until: float = 0.0


class Handshakes:
    """The handshakes of one listening socket; connections are identified by their file
    descriptor."""

    def __init__(
        self,
        *,
        listens: bool = False,
        is_trusted: Callable[[str], bool] = lambda host: False,
        ban: Callable[[str], None] = lambda key: None,
        measure: "Callable[[int, PeerName], Traffic | None] | None" = None,
        hang_up: "Callable[[int, PeerName], None] | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """listens: True for the events socket, whose peers send only subscriptions after their
        handshake.
        is_trusted(address): True if an authorized key has connected from there; ban(key) is called
        for a subscriber that was shut down."""
        self._listens = listens
        self._is_trusted = is_trusted
        self._ban = ban
        self._measure = measure or _traffic
        self._hang_up = hang_up or _hang_up
        self._clock = clock
        self._look_at = self._listeners_at = 0.0
        self._has_young = False
        self._unfinished: dict[int, _Connection] = {}
        """Oldest first."""
        self._listeners: dict[int, _Connection] = {}
        self._cut: dict[int, str] = {}
        """The reason, for connections that were shut down and have not ended yet."""

    @property
    def patience_ms(self) -> int | None:
        """The time until look() is due; None if there are no connections."""
        if self._unfinished or self._has_young:
            return int(LOOK_S * 1000)
        return int(LISTENER_LOOK_S * 1000) if self._listeners else None

    def began(self, descriptor: int, name: PeerName) -> None:
        """Record an accepted connection. If there are too many, shut down the oldest from the
        address that has the most. A peer that has the daemon's public key gets no preference, since
        a replayed HELLO proves as much; a genuine handshake ends long before it is the oldest."""
        self.ended(descriptor)
        self._unfinished[descriptor] = _Connection(name)
        is_trusted = self._is_trusted(name[0])
        limit = MAX_TRUSTED if is_trusted else MAX_UNKNOWN
        while len(alike := self._alike(is_trusted)) > limit:
            crowds = Counter(connection.name[0] for connection in alike.values())
            victim = max(alike, key=lambda each: crowds[alike[each].name[0]])  # the first of these
            self._examine(victim, alike[victim])
            if victim in self._unfinished:
                self._cut_off(victim, "too many handshakes are unfinished")

    def _alike(self, is_trusted: bool) -> dict[int, _Connection]:
        """Return the unfinished handshakes of addresses that are now trusted, or of unknown
        ones."""
        return {
            descriptor: connection
            for descriptor, connection in self._unfinished.items()
            if self._is_trusted(connection.name[0]) == is_trusted
        }

    def came_in(self, host: str, key: str) -> None:
        """Record that an authorized key connected from this address: on one of the connections
        whose handshake has reached that point."""
        for descriptor, connection in self._unfinished.items():
            if connection.name[0] == host:
                traffic = self._measure(descriptor, connection.name)
                if traffic is not None and traffic.received >= _SENT_INITIATE:
                    connection.keys.add(key)

    def look(self) -> None:
        """Check all handshakes if the interval is over: remove those that are finished, and shut
        down peers that have sent too much."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            for descriptor, connection in list(self._unfinished.items()):
                self._examine(descriptor, connection)
            self._look_at_listeners(now)

    def _look_at_listeners(self, now: float) -> None:
        """Shut down subscribers that have sent too much: young ones are checked each time, others
        at their interval."""
        is_time = now >= self._listeners_at
        if is_time:
            self._listeners_at = now + LISTENER_LOOK_S
        self._has_young = False
        for descriptor, connection in list(self._listeners.items()):
            is_young = now < connection.young_until
            self._has_young |= is_young
            if not is_young and not is_time:
                continue
            traffic = self._measure(descriptor, connection.name)
            if traffic is not None and traffic.received > MAX_LISTENER_BYTES:
                self._cut_off(descriptor, "it has sent too much to a socket that only publishes")
                if len(connection.keys) == 1:
                    self._ban(next(iter(connection.keys)))

    def ended(self, descriptor: int) -> str:
        """Record the end of a connection; return the reason if it was shut down."""
        self._unfinished.pop(descriptor, None)
        self._listeners.pop(descriptor, None)
        return self._cut.pop(descriptor, "")

    def _examine(self, descriptor: int, connection: _Connection) -> None:
        """Check an unfinished handshake."""
        traffic = self._measure(descriptor, connection.name)
        if traffic is None:
            del self._unfinished[descriptor]  # ended, or no TCP_INFO
            return
        if traffic.sent >= _HAS_READY:
            del self._unfinished[descriptor]
            if self._listens:
                connection.young_until = self._clock() + YOUNG_S
                self._listeners[descriptor] = connection
                self._has_young = True
        elif traffic.received > MAX_HANDSHAKE_BYTES:
            self._cut_off(descriptor, "its handshake is too long")

    def _cut_off(self, descriptor: int, why: str) -> None:
        connection = self._unfinished.pop(descriptor, None) or self._listeners.pop(descriptor)
        self._cut[descriptor] = why
        self._hang_up(descriptor, connection.name)


def _with_connection(
    descriptor: int, name: PeerName, use: "Callable[[socket.socket], object]"
) -> object:
    """Call `use` with the connection to this peer and return its result; None if the descriptor,
    which another thread owns, no longer belongs to that connection."""
    with suppress(OSError), borrowed(descriptor) as connection:
        if connection.getpeername()[:2] == name:
            return use(connection)
    return None


def _traffic(descriptor: int, name: PeerName) -> Traffic | None:
    """Return the bytes that a connection has carried; None if it has ended, or if an old kernel
    does not report them."""

    def read(connection: socket.socket) -> Traffic | None:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TRAFFIC.size)
        return Traffic(*_TRAFFIC.unpack(info)) if len(info) == _TRAFFIC.size else None

    found = _with_connection(descriptor, name, read)
    return found if isinstance(found, Traffic) else None


def _hang_up(descriptor: int, name: PeerName) -> None:
    """End a connection; libzmq finds it ended and closes it."""
    _with_connection(descriptor, name, lambda connection: connection.shutdown(socket.SHUT_RDWR))
