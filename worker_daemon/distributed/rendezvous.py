"""Wraps a link's rendezvous as a torch store. One of the group's daemons serves it on its data
interface, only to ranks."""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]  # public nevertheless

from rendezvous.store import Member, RendezvousError, StoreServer
from rpc_schema.errors import CommError
from worker_daemon.raising import Translation

REACHABLE_S: Final = 0.2


class RendezvousServer(StoreServer):
    """Serves one link's rendezvous. Owned by the control thread; ends by itself once all ranks have
    connected and left, or when it is closed."""

    def __init__(self, host: str, num_ranks: int) -> None:
        """Serve on a free port of host, an IPv4 or IPv6 address.

        Raises:
            CommError: the interface is down.
        """
        _check_reachable(host)
        super().__init__(host, num_ranks)


def _check_reachable(host: str) -> None:
    """Check the interface: if it is down, the ranks would wait for minutes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as listener:
            socket.create_connection((host, listener.getsockname()[1]), REACHABLE_S).close()
    except OSError as error:
        problem = f"this host cannot reach its own data interface: {error}"
        fix = "see to the interface, then relink"
        raise CommError(problem, field="data-interface", value=host, fix=fix) from error


class RendezvousStore(Store):
    """Presents a rendezvous to torch as a store. After the rendezvous has ended, torch's queries
    find nothing, since existing groups no longer need it. Keep it as long as the groups exist,
    because torch does not."""

    def __init__(self, board: Member, timeout_s: float) -> None:
        """timeout_s: the longest wait for a value, which overrides torch's."""
        super().__init__()
        self._board = board
        self._timeout_s = timeout_s
        self._is_over = False

    def set(self, key: str, value: bytes | str) -> None:
        if self._is_over:
            return
        with _meeting():
            self._board.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key, self._timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Report nothing: no caller polls this store."""
        return False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._get(key, min(limit_s, self._timeout_s))

    def clone(self) -> "RendezvousStore":
        """Return the same store: any thread may use it."""
        return self

    def end(self) -> None:
        """Leave the rendezvous. Idempotent."""
        self._is_over = True
        self._board.close()

    def _get(self, key: str, timeout_s: float) -> bytes:
        if self._is_over:
            raise CommError(
                "the rendezvous is over", field="key", value=key, fix="relink the group"
            )
        with _meeting():
            return self._board.get(key, timeout_s)


def _meeting() -> Translation:
    def translate(error: Exception) -> CommError:
        return CommError(
            f"the rendezvous of the ranks failed: {error}", fix="open a new rendezvous and relink"
        )

    return Translation((RendezvousError,), translate)


def connect_store(host: str, port: int, secret: bytes, timeout_s: float) -> RendezvousStore:
    """Connect to another daemon's RendezvousServer.

    Raises:
        CommError: no holder of the secret answers there within timeout_s.
    """
    try:
        return RendezvousStore(Member(host, port, secret, timeout_s), timeout_s)
    except RendezvousError as error:
        problem = f"no rendezvous answers: {error}"
        fix = "open a new rendezvous and relink"
        raise CommError(problem, field="rendezvous", value=f"{host}:{port}", fix=fix) from error
