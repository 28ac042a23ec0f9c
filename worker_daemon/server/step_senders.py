"""Senders of step requests: the peer behind each routing id, the owner of each epoch, and the
attached driver's socket. Used by the step thread alone."""

from dataclasses import dataclass
from typing import Final

import zmq

from rpc_schema.operations import StepMessage
from worker_daemon.server.auth.bad_peers import Peer
from worker_daemon.server.auth.security import Security

MAX_OLD_DRIVERS: Final = 16
MAX_KNOWN_PEERS: Final = 256


@dataclass(frozen=True, slots=True)
class EpochOwner:
    """The driver that an epoch was granted to."""

    owner: str
    """A public key or, without keys, a user."""
    route: bytes
    """Routing id of the driver's results socket."""


@dataclass(frozen=True, slots=True)
class Clearance:
    """A request that its sender was allowed to send. So is another request that is equal in all of
    this."""

    sender: bytes = b""
    """Routing id that ZeroMQ chose, so that it stays the same peer's."""
    rights: object = None
    """`Access.keys.by_key` from before the checks."""
    epoch: int = 0
    kind: type[StepMessage] | None = None


class StepSenders:
    """The known peers, epoch owners and current driver. Every step reads the attributes; the step
    loop sets `driver` when it accepts a request."""

    __slots__ = ("access", "bad_peers", "cleared", "driver", "known", "owners")

    def __init__(self, security: Security) -> None:
        self.access = security.access
        self.bad_peers = security.bad_peers
        self.driver = b""
        """Routing id of the socket that sent the last accepted request; empty before the first one
        of an epoch."""
        self.cleared = Clearance()
        """The last request that was cleared: steps of a driver are checked once."""
        self.known: dict[bytes, Peer] = {}
        """Peers by routing id, if ZeroMQ chose the id."""
        self.owners: dict[int, EpochOwner] = {}
        """Owners by epoch."""

    def identify(self, sender: bytes, frame: zmq.Frame) -> Peer:
        """Return the peer of a step socket. It is cached if ZeroMQ chose the routing id: a counter
        with a random 32-bit start, which no other peer learns."""
        peer = self.access.peer("step", sender, frame)
        if sender[:1] == b"\0":
            if len(self.known) == MAX_KNOWN_PEERS:
                self.known.clear()
            self.known[sender] = peer
        return peer

    def clear(self, sender: bytes, rights: object, message: StepMessage) -> None:
        """Note that the sender may send this request, for others like it."""
        if sender in self.known:
            self.cleared = Clearance(sender, rights, message.epoch, type(message))

    def attach(self, epoch: int, owner: EpochOwner) -> None:
        """Begin an epoch; owners of the oldest epochs are forgotten."""
        self.driver = b""
        self.cleared = Clearance()
        self.owners[epoch] = owner
        if len(self.owners) > MAX_OLD_DRIVERS:
            del self.owners[min(self.owners)]

    def is_driver(self, sender: bytes, peer: Peer, epoch: int) -> bool:
        """Return True if a step socket is that of the epoch's driver, which may have connected
        again. Without keys all peers may have the same owner: then only the socket of the last
        accepted request counts or, before the first one, any."""
        owner = self.owners.get(epoch)
        if owner is None or owner.owner != self.access.owner(peer):
            return False
        return self.access.proves_owners or self.driver in (sender, b"")
