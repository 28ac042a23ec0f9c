"""Who can listen at an ipc endpoint: asked before anything is said to a daemon that proves no key.
Opens no socket."""

from pathlib import Path

from rpc_schema.safe_paths import trusted_users, why_unsafe
from worker_client.errors import UntrustedEndpointError

SCHEME = "ipc://"


def check_owner(address: str) -> None:
    """Check that only this user or root can listen at an ipc address. What is not there yet is not
    judged, nor what this user cannot reach.

    Raises:
        UntrustedEndpointError: another user's process may listen there.
    """
    path = Path(address.removeprefix(SCHEME))
    try:
        why = why_unsafe(path.parent)
        why = f"its directory {why}" if why else _foreign_socket(path)
    except OSError:
        return
    if why:
        raise UntrustedEndpointError(address, why)


def _foreign_socket(path: Path) -> str:
    owner = path.lstat().st_uid
    return "" if owner in trusted_users() else f"it belongs to user {owner}"
