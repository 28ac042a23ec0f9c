"""Connections to daemons without attaching, and a scrape of their status during a run."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

from rpc_schema.errors import WorkerDaemonError
from worker_client.wire.health_client import connected
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.worker_client import AskingClient

SCRAPE_INTERVAL_S: Final = 0.1
SCRAPE_TIMEOUT_S: Final = 1.0


def connect(
    endpoints: Sequence[str], keys: Keys = NO_KEYS, wait_s: float = 0.0
) -> contextlib.AbstractContextManager[list[AskingClient]]:
    """Open a client for each daemon, for control requests only: see connected()."""
    return connected(AskingClient, endpoints, keys, wait_s)


class Scrape:
    """Polls each daemon's status every SCRAPE_INTERVAL_S on its own thread, as a metrics collector
    would, for the duration of a `with`, and at least once. Retries a daemon that does not
    answer."""

    def __init__(self, endpoints: Sequence[str], keys: Keys = NO_KEYS) -> None:
        self.num_statuses = 0
        """Number of replies so far."""
        self._endpoints = endpoints
        self._keys = keys
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scrape", daemon=True)

    def __enter__(self) -> "Scrape":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with connect(self._endpoints, self._keys) as clients:
            while clients:
                for client in clients:
                    with contextlib.suppress(WorkerDaemonError):
                        client.get_status(SCRAPE_TIMEOUT_S)
                        self.num_statuses += 1
                if self._ended.wait(SCRAPE_INTERVAL_S):
                    return
