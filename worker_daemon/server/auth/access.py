"""Authorization: the role that each request needs, and the role of its sender."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import zmq

from rpc_schema import lifecycle as lc
from rpc_schema.errors import ForbiddenError
from rpc_schema.operations import CONTROL_OPERATIONS, STEP_OPERATIONS, ControlMessage, StepMessage
from rpc_schema.roles import Role
from worker_daemon.server.auth.bad_peers import Peer
from worker_daemon.server.auth.keys import AuthorizedKeys, KeyRights
from worker_host.key_files import fingerprint

Request: TypeAlias = ControlMessage | StepMessage


class Sender(NamedTuple):
    """The sender of a control request."""

    owner: str
    """The owner that the handshake proved: a public key or, without keys, a user."""
    drives: bool
    """True if its role lets it attach."""
    pid: int = 0
    """Its process, if the kernel knows it: of an ipc connection, in this process's namespace."""
    shown: str = ""
    """Its key by name, if there are keys, and its process or address, for the log."""


_UNKNOWN: Final = ("", "", "")

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
"""The role that a peer needs to use each socket."""


def needed_role(message: Request) -> Role:
    """Return the role that a request needs; taking a daemon from another driver by force needs an
    admin.

    Raises:
        ForbiddenError: the request is not in the table of operations.
    """
    if isinstance(message, lc.PrepareAttach) and message.force:
        return Role.ADMIN
    needed = _NEEDED.get(type(message))
    if needed is None:
        raise ForbiddenError(f"{type(message).__name__} is not in the table of operations")
    return needed


class Access:
    """Identifies senders and checks their rights. Any thread may call it. This class is for sockets
    without keys: any process that can open them may send any request."""

    proves_owners = False
    """True if each owner has its own key; otherwise all peers may have the same owner."""

    def __init__(self, keys: KeyRights | None = None) -> None:
        self.keys = keys or KeyRights()
        """A verdict of this class holds while `keys.by_key` is the same object."""

    def peer(self, socket: str, route: bytes, frame: zmq.Frame) -> Peer:
        """Identify a sender. frame: the first of a message from `route`. Without keys, the peer is
        its routing id and the user that the kernel reports for the connection."""
        return socket, route, _user(frame)

    def owner(self, peer: Peer) -> str:
        """Return the owner of a peer, to whom epochs and driver ids belong; without keys, a
        user."""
        return peer[2]

    def key_name(self, peer: Peer) -> str:
        """Return the name of a peer's key for the log, and the key's first characters; empty
        without keys."""
        return ""

    def opens(self, peer: Peer, socket: str) -> bool:
        """Return True if messages of the peer on this socket may be read."""
        return True

    def only_observes(self, peer: Peer) -> bool:
        """Return True if the peer's rate is limited: an observer's key, or one that was removed."""
        return False

    def check(self, peer: Peer, message: Request) -> None:
        """Raise ForbiddenError unless the peer may send this request; without keys, any request in
        the table of operations."""
        if type(message) not in _NEEDED:
            needed_role(message)


class KeyedAccess(Access):
    """Identifies peers by the key that they proved in the handshake. The role is looked up for
    every message, unless no key has changed since the last one, so that a removed key is refused on
    open connections too."""

    proves_owners = True

    def __init__(self, roles: AuthorizedKeys) -> None:
        super().__init__(roles)
        self._roles = roles

    def peer(self, socket: str, route: bytes, frame: zmq.Frame) -> Peer:
        """See Access: by public key, which our ZAP reply set as the user id."""
        return str(frame.get("User-Id"))

    def owner(self, peer: Peer) -> str:
        """See Access: a public key."""
        return str(peer)

    def key_name(self, peer: Peer) -> str:
        """See Access."""
        key = str(peer)
        return f"key {self._roles.name(key)!r} ({fingerprint(key)}), "

    def opens(self, peer: Peer, socket: str) -> bool:
        """See Access."""
        role = self._roles.role(str(peer))
        return role is not None and role.covers(SOCKET_ROLES[socket])

    def only_observes(self, peer: Peer) -> bool:
        """See Access."""
        return not self.opens(peer, "step")

    def check(self, peer: Peer, message: Request) -> None:
        """See Access."""
        key = str(peer)
        role, needed = self._roles.role(key), needed_role(message)
        if role is None or not role.covers(needed):
            raise forbidden(key, role, needed, type(message).__name__)


def sender(access: Access, peer: Peer, frame: zmq.Frame) -> Sender:
    """Return a peer as the sender of a control request. frame: of that request."""
    pid = _credentials(frame)[2]
    drives = access.opens(peer, "step")
    shown = access.key_name(peer) + place_of(_address(frame))
    return Sender(access.owner(peer), drives, int(pid) if pid.isdecimal() else 0, shown)


def place_of(address: str) -> str:
    """Return libzmq's address of a peer for the log; that of ipc is localhost:UID:GID:PID."""
    host, *ids = address.split(":")
    return f"pid {ids[2]} of user {ids[0]}" if host == "localhost" and len(ids) == 3 else address


def _address(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "unknown address"


def _user(frame: zmq.Frame) -> str:
    """Return the user of an ipc connection; empty if the system does not report it."""
    return _credentials(frame)[0]


def _credentials(frame: zmq.Frame) -> Sequence[str]:
    """Return user, group and process of an ipc connection, which libzmq describes as
    localhost:UID:GID:PID; empty if the system does not report them."""
    # Runs once per step: plain statements, no context manager.
    try:
        parts = str(frame.get("Peer-Address")).split(":")
    except zmq.ZMQError:
        return _UNKNOWN
    return parts[1:] if len(parts) == 4 else _UNKNOWN


def forbidden(key: str, role: Role | None, needed: Role, request: str) -> ForbiddenError:
    """Return the error that names the role and the request."""
    has = "is not among the authorized keys any more" if role is None else f"has the role {role}"
    problem = f"{request} needs the role {needed}; the key {fingerprint(key)} {has}"
    fix = f"use a key with the role {needed}, or give this one that role and send SIGHUP"
    return ForbiddenError(problem, field="role", value=None if role is None else str(role), fix=fix)
