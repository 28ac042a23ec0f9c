"""What a peer on the control socket may do. Knows how to refuse, not who the peer is: that is for
whoever authenticates it."""

from typing import Final, Literal, Protocol, TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema.codec import ControlMessage
from worker_daemon.errors import ForbiddenError

Role: TypeAlias = Literal["driver", "observer", "admin"]
ALL_ROLES: Final[frozenset[Role]] = frozenset(("driver", "observer", "admin"))


class Roles(Protocol):
    """Who has which roles; asked on the control thread for every request."""

    def of(self, sender: bytes) -> frozenset[Role]:
        """Return the roles of the peer with this routing id."""


class AllRoles:
    """Of ipc without keys: whoever can open the socket may do everything."""

    def of(self, sender: bytes) -> frozenset[Role]:
        """See Roles."""
        return ALL_ROLES


def check_role(message: ControlMessage, roles: frozenset[Role]) -> None:
    """Raise ForbiddenError if a request needs a role that its sender lacks."""
    if isinstance(message, lc.PrepareAttach) and message.force and "admin" not in roles:
        raise ForbiddenError(
            "taking the lease from its holder needs the role admin",
            field="force",
            value=True,
            fix="wait until the lease is free, or use an admin's key",
        )
