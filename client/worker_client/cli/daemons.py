"""Connections to daemons without attaching, and a scrape of their status during a run."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

import zmq

from rpc_schema.errors import WorkerDaemonError
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.transport import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import CONTROL_TIMEOUT_S, AskingClient

SCRAPE_INTERVAL_S: Final = 0.1
SCRAPE_TIMEOUT_S: Final = 1.0


@contextlib.contextmanager
def connect(
    endpoints: Sequence[str], keys: Keys = NO_KEYS, wait_s: float = 0.0
) -> Iterator[list[AskingClient]]:
    """Open a client for each daemon, for control requests only; closed at the end. wait_s: seconds
    to wait for daemons that are not started, or do not answer, yet.

    Raises:
        EndpointError: one is not an endpoint.
        NothingListens: no daemon listens at one after wait_s.
        DeadlineExceeded: one listens, but has not answered after wait_s. Without wait_s the first
            request raises either.
    """
    parsed = [parse_endpoint(endpoint, keys) for endpoint in endpoints]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    driver_id = new_driver_id()
    clients = [
        AskingClient(context, endpoint, rank, driver_id) for rank, endpoint in enumerate(parsed)
    ]
    answer_by = time.monotonic() + wait_s
    try:
        for client in clients if wait_s else ():
            client.greet(CONTROL_TIMEOUT_S, answer_by)
        yield clients
    finally:
        for client in clients:
            client.close()
        context.term()


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
