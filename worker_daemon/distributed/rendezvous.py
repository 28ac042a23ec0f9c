"""Where the ranks of a link meet: a TCPStore on a socket that we bind ourselves, on the data
interface alone."""

import socket
from datetime import timedelta
from typing import Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public all the same

from worker_daemon.errors import CommError

REACHABLE_S: Final = 0.2
SELF_TIMEOUT_S: Final = 1.0


class RendezvousServer:
    """Serves one link's store. Owned by the control thread; closed when the next link has replaced
    it."""

    def __init__(self, host: str) -> None:
        """Bind an ephemeral port of host, an IPv4 or IPv6 address, and serve on it.

        torch's own listener would ignore the host, hence the handed-over file descriptor. torch
        connects to it, too, and waits for minutes where that is not possible: hence the attempt
        before that.

        Raises:
            CommError: the interface is down.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family, backlog=128) as listener:
            self.host = host
            self.port: int = listener.getsockname()[1]
            _check_reachable(host, self.port)
            self._store: TCPStore | None = TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=SELF_TIMEOUT_S),
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        """Stop serving. Links that are up do not need the store any more."""
        self._store = None


def _check_reachable(host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), REACHABLE_S).close()
    except OSError as error:
        raise CommError(
            f"this host cannot reach its own data interface: {error}",
            field="data-interface",
            value=host,
            fix="see to the interface, then relink",
        ) from error


def connect_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to another daemon's RendezvousServer.

    Raises:
        CommError: nobody answers there within timeout_s.
    """
    try:
        return TCPStore(
            host,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise CommError(
            f"no rendezvous store answers: {error}",
            field="rendezvous",
            value=f"{host}:{port}",
            fix="open a new rendezvous and relink",
        ) from error
