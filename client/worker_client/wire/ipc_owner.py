"""Checks the owner of an ipc endpoint, before anything is sent to a daemon without a key."""

from pathlib import Path

from worker_client.errors import UntrustedEndpointError
from worker_host.safe_paths import trusted_users, why_unsafe

SCHEME = "ipc://"


def check_owner(address: str) -> None:
    """Check that only this user or root can listen at an ipc address. Paths that do not exist yet,
    or that this user cannot reach, pass.

    Raises:
        UntrustedEndpointError: another user's process may listen there.
    """
    path = Path(address.removeprefix(SCHEME))
    try:
        why = why_unsafe(path.parent)
        why = why and f"its directory {why}"
        if not why and (owner := path.lstat().st_uid) not in trusted_users():
            why = f"it belongs to user {owner}"
    except OSError:
        return
    if why:
        raise UntrustedEndpointError(address, why)
