"""Who may ask for what: the role that each request needs, and the role that its sender has. Knows
no socket; of a frame it reads what the handshake left there."""

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol, TypeAlias

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.key_files import Role, fingerprint
from rpc_schema.operations import (
    CONTROL_OPERATIONS,
    STEP_OPERATIONS,
    ControlMessage,
    StepMessage,
)
from worker_daemon.errors import ForbiddenError
from worker_daemon.server.auth.bad_peers import Peer

Request: TypeAlias = ControlMessage | StepMessage


class Sender(NamedTuple):
    """Who sent a control request."""

    owner: str
    """Whom the handshake named: a public key or, without keys, a user."""
    drives: bool
    """Its role lets it attach."""


_NEEDED: Final[Mapping[type[Request], Role]] = {
    **{request: row.role for request, row in CONTROL_OPERATIONS.items()},
    **{request: row.role for request, row in STEP_OPERATIONS.items()},
}

SOCKET_ROLES: Final[Mapping[str, Role]] = {
    "control": Role.OBSERVER,
    "events": Role.OBSERVER,
    "step": Role.DRIVER,
    "results": Role.DRIVER,
}
"""The role that opens each socket at all."""


def needed_role(message: Request) -> Role:
    """Return the role that a request needs; an admin's to take a daemon from another driver by
    force.

    Raises:
        ForbiddenError: it is no operation, so no role may ask for it.
    """
    if isinstance(message, lc.PrepareAttach) and message.force:
        return Role.ADMIN
    needed = _NEEDED.get(type(message))
    if needed is None:
        raise ForbiddenError(f"{type(message).__name__} is not in the table of operations")
    return needed


class Roles(Protocol):
    """What keys may do at this moment."""

    def role(self, public_key: str) -> Role | None:
        """Return a key's role; None: it may do nothing."""


class Access(Protocol):
    """Who a sender is, and what it may do. Any thread may ask."""

    proves_owners: bool
    """An owner has a key of its own; else all peers may have the same one."""

    def peer(self, socket: str, route: bytes, frame: zmq.Frame) -> Peer:
        """Tell senders apart: `frame` is the first of a message that came from `route`."""

    def owner(self, peer: Peer) -> str:
        """Return whom the handshake named: what epochs and driver ids are bound to."""

    def opens(self, peer: Peer, socket: str) -> bool:
        """Tell whether anything that peer sends to this socket may be looked at."""

    def check(self, peer: Peer, message: Request) -> None:
        """Raise ForbiddenError unless the peer may ask for this."""


class OpenAccess:
    """Without keys: the directory decides who can open the sockets, and those may do
    everything."""

    proves_owners = False

    def peer(self, socket: str, route: bytes, frame: zmq.Frame) -> Peer:
        """See Access: by routing id, with the user that the kernel says the connection has."""
        return socket, route, _user(frame)

    def owner(self, peer: Peer) -> str:
        """See Access: a user."""
        return peer[2]

    def opens(self, peer: Peer, socket: str) -> bool:
        """See Access."""
        return True

    def check(self, peer: Peer, message: Request) -> None:
        """See Access: any role, for what the tables list."""
        if type(message) not in _NEEDED:
            needed_role(message)


class KeyedAccess:
    """By the key that a peer proved to have in the handshake. Its role is looked up for every
    message, so that a key that was taken out is refused on open connections too."""

    proves_owners = True

    def __init__(self, roles: Roles) -> None:
        self._roles = roles

    def peer(self, socket: str, route: bytes, frame: zmq.Frame) -> Peer:
        """See Access: by public key, which our answer to the handshake made the user id."""
        return str(frame.get("User-Id"))

    def owner(self, peer: Peer) -> str:
        """See Access: a public key."""
        return str(peer)

    def opens(self, peer: Peer, socket: str) -> bool:
        """See Access."""
        role = self._roles.role(str(peer))
        return role is not None and role.covers(SOCKET_ROLES[socket])

    def check(self, peer: Peer, message: Request) -> None:
        """See Access."""
        key = str(peer)
        role, needed = self._roles.role(key), needed_role(message)
        if role is None or not role.covers(needed):
            raise forbidden(key, role, needed, type(message).__name__)


def sender(access: Access, peer: Peer) -> Sender:
    """Return who a peer is as a driver."""
    return Sender(access.owner(peer), drives=access.opens(peer, "step"))


def _user(frame: zmq.Frame) -> str:
    """Return the user at the other end of an ipc connection, which libzmq describes as
    localhost:UID:GID:PID; empty where the system does not tell."""
    # Asked for every step: plain statements, no context manager.
    try:
        parts = str(frame.get("Peer-Address")).split(":")
    except zmq.ZMQError:
        return ""
    return parts[1] if len(parts) == 4 else ""


def forbidden(key: str, role: Role | None, needed: Role, request: str) -> ForbiddenError:
    """Return the error that names role and request."""
    has = "is not among the authorized keys any more" if role is None else f"has the role {role}"
    return ForbiddenError(
        f"{request} needs the role {needed}; the key {fingerprint(key)} {has}",
        field="role",
        value=None if role is None else str(role),
        fix=f"use a key with the role {needed}, or give this one that role and send SIGHUP",
    )
