"""Detects an endpoint without a daemon while a request waits for a connection: ZeroMQ itself would
wait forever."""

import socket
import time

from worker_client.errors import NothingListens, WorkerDied
from worker_client.wire.processes import connection_error

FIRST_PROBE_S = 0.2
LAST_PROBE_S = 5.0
"""Pauses between probes on tcp, the first and the longest: a daemon notices and logs each probe."""


class Listener:
    """One endpoint's. While a request waits, its owner calls is_there() or check()."""

    def __init__(self, address: str, rank: int) -> None:
        self._address = address
        self._rank = rank
        self._is_local = address.startswith("ipc://")
        self._was_there = False
        self._pause_s = 0.0
        """Last pause before a probe; 0: there was a connection since."""
        self._next_probe = 0.0

    def is_there(self) -> None:
        """Record that there is a connection."""
        self._was_there = True
        self._pause_s = 0.0

    def check(self) -> None:
        """Handle the lack of a connection: raise NothingListens or, if something listened before,
        WorkerDied if new connections are refused. If nothing listened before, a host that does not
        resolve and a socket without permission to connect are NothingListens too; later they say
        nothing about the daemon. On ipc a daemon does not notice the probe, so every call
        probes."""
        if not self._is_local and not self._is_due():
            return
        error = connection_error(self._address)
        why = _refusal(error)
        if not why:
            self._check_reachable(error)
            self._was_there = True
        elif self._was_there:
            self._was_there = False
            ended = f"it ended before it answered: {why} (signal: transport)"
            raise WorkerDied(self._rank, self._address, ended)
        else:
            raise NothingListens(self._rank, self._address, why)

    def _check_reachable(self, error: OSError | None) -> None:
        if self._was_there:
            return
        if isinstance(error, socket.gaierror):
            why, fix = "its host name does not resolve", "name a host that resolves here"
        elif self._is_local and isinstance(error, PermissionError):
            why, fix = "no permission to connect", "run as the daemon's user"
        else:
            return
        raise NothingListens(self._rank, self._address, f"{why} ({error.strerror})", fix)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if self._pause_s and now < self._next_probe:
            return False
        is_first = not self._pause_s
        self._pause_s = FIRST_PROBE_S if is_first else min(2 * self._pause_s, LAST_PROBE_S)
        self._next_probe = now + self._pause_s
        return not is_first


def _refusal(error: OSError | None) -> str:
    """Return how a connection was refused; empty: it was not."""
    if isinstance(error, FileNotFoundError):
        return "the socket is missing"
    if isinstance(error, ConnectionRefusedError):
        return "connections are refused"
    return ""
