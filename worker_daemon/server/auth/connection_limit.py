"""Limits the rate of new connections from unknown addresses to a tcp socket: above the limit the
kernel drops their attempts, before libzmq accepts them or reads a byte. Addresses from which an
authorized key has connected are never limited, so that a flood from elsewhere does not lock a
driver out. Used by the ZAP thread.

libzmq accepts every connection of its listening socket, so the limit is a filter on that socket
(classic BPF, which needs no privilege: socket(7), SO_ATTACH_FILTER). Open connections are separate
sockets and are not affected.
"""

import ipaddress
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from rendezvous.borrowed_sockets import borrowed
from rendezvous.listeners import NOBODY, RETURN, Instruction, attach_filter

RATE_PER_S: Final = 20.0
"""Connections from unknown addresses that each socket accepts per second on average."""
BURST: Final = 100
"""Connections from unknown addresses that each socket accepts at once."""
SHUT_S: Final = 1.0
"""Minimum time that the filter stays, so that it is not replaced for each connection."""
MAX_TRUSTED: Final = 16

_SO_DETACH_FILTER: Final = 27
_LOAD, _JUMP_IF_EQUAL = 0x20, 0x15
_NETWORK_HEADER: Final = -0x100000
"""SKF_NET_OFF: offsets from here on count from the IP header."""
_SOURCE: Final = {socket.AF_INET: 12, socket.AF_INET6: 8}
"""Offset of the sender's address in the IP header."""
_KEEP: Final = 0xFFFFFFFF

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class TrustedAddresses:
    """The addresses from which authorized keys connected last."""

    def __init__(self) -> None:
        self._known: OrderedDict[Address, None] = OrderedDict()

    def add(self, text: str) -> None:
        """Add an address; text that is not an IP address (that of an ipc peer, say) is ignored."""
        with suppress(ValueError):
            address = ipaddress.ip_address(text)
            self._known[address] = None
            self._known.move_to_end(address)
            if len(self._known) > MAX_TRUSTED:
                self._known.popitem(last=False)

    def __contains__(self, text: str) -> bool:
        with suppress(ValueError):
            return ipaddress.ip_address(text) in self._known
        return False

    def addresses(self) -> list[Address]:
        """Return all."""
        return list(self._known)


class ConnectionLimit:
    """The limit of one listening socket; the filter is attached only during a flood."""

    def __init__(
        self,
        descriptor: int,
        trusted: TrustedAddresses,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """descriptor: the listening socket's, which another thread owns."""
        self.is_shut = False
        self._descriptor = descriptor
        self._trusted = trusted
        self._clock = clock
        self._name = _with_listener(descriptor, lambda listener: listener.getsockname())
        self._left = float(BURST)
        self._filled_at = clock()
        self._reopens_at = 0.0

    def entered(self, address: str) -> bool:
        """Count an accepted connection from this address; return True if it reaches the limit."""
        if address in self._trusted or self.is_shut:
            return False
        now = self._clock()
        self._left = min(BURST, self._left + RATE_PER_S * (now - self._filled_at)) - 1.0
        self._filled_at = now
        if self._left >= 0.0:
            return False
        self._reopens_at = now + SHUT_S
        self.is_shut = self._apply(lambda listener: _attach(listener, self._trusted.addresses()))
        return self.is_shut

    def look(self) -> None:
        """Detach the filter if it has expired."""
        if self.is_shut and self._clock() >= self._reopens_at:
            self.is_shut = False
            self._apply(_detach)

    def renew(self) -> None:
        """Renew the filter, for a new trusted address."""
        if self.is_shut:
            self._apply(lambda listener: _attach(listener, self._trusted.addresses()))

    def _apply(self, change: "Callable[[socket.socket], None]") -> bool:
        """Change the filter, if the socket still exists; return True if it does."""

        def if_ours(listener: socket.socket) -> bool:
            if listener.getsockname() != self._name:
                return False
            change(listener)
            return True

        return bool(_with_listener(self._descriptor, if_ours))


def _with_listener(descriptor: int, use: "Callable[[socket.socket], object]") -> object:
    """Call `use` with a listening internet socket; None if the descriptor is not such a socket."""
    with suppress(OSError), borrowed(descriptor) as listener:
        if listener.family in _SOURCE and listener.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return use(listener)
    return None


def _attach(listener: socket.socket, trusted: Sequence[Address]) -> None:
    """Replace the socket's filter."""
    version = 4 if listener.family == socket.AF_INET else 6
    wanted = [address.packed for address in trusted if address.version == version]
    attach_filter(listener, program(wanted, _SOURCE[listener.family]))


def _detach(listener: socket.socket) -> None:
    with suppress(OSError):  # the socket has no filter
        listener.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def program(trusted: Sequence[bytes], offset: int) -> list[Instruction]:
    """Return the filter that accepts packets only from these addresses. offset: the sender
    address's, in the IP header. Each address is compared word by word; the next address is tried on
    a mismatch."""
    made: list[Instruction] = []
    for address in trusted:
        words = struct.unpack(f"!{len(address) // 4}I", address)
        for index, word in enumerate(words):
            rest = 2 * (len(words) - 1 - index) + 1  # skip the rest of this address's instructions
            made.append((_LOAD, 0, 0, (_NETWORK_HEADER + offset + 4 * index) & 0xFFFFFFFF))
            made.append((_JUMP_IF_EQUAL, 0, rest, word))
        made.append((RETURN, 0, 0, _KEEP))
    return [*made, *NOBODY]
