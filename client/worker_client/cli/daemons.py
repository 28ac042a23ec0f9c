"""Connections to daemons without attaching, and a scrape of their status during a run."""

import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from rpc_schema.errors import WorkerDaemonError
from worker_client.cli.options import KeyFile, KnownDaemons, Wait
from worker_client.wire.endpoint import named_daemons
from worker_client.wire.health_client import connected
from worker_client.wire.keys import NO_KEYS, Keys, read_keys
from worker_client.wire.worker_client import AskingClient

SCRAPE_INTERVAL_S: Final = 0.1
SCRAPE_TIMEOUT_S: Final = 1.0


def connect(
    endpoints: Sequence[str], keys: Keys = NO_KEYS, wait_s: float = 0.0
) -> contextlib.AbstractContextManager[list[AskingClient]]:
    """Open a client for each daemon, for control requests only: see connected()."""
    return connected(AskingClient, endpoints, keys, wait_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDaemons:
    """Options of commands that ask running daemons: which, and how to reach them."""

    endpoints: Annotated[
        str, typer.Option(envvar="WORKER_CLIENT_ENDPOINTS", help="Running daemons: EP,EP,...")
    ]
    key_file: KeyFile = None
    known_daemons: KnownDaemons = None
    wait: Wait = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Their endpoints, in rank order. Raises ClientConfigError: there are none."""
        return named_daemons(self.endpoints)

    def keys(self) -> Keys:
        """Read the keys for them."""
        return read_keys(self.key_file, self.known_daemons)

    def connect(self) -> contextlib.AbstractContextManager[list[AskingClient]]:
        """Open a client for each, for control requests only: see connected()."""
        keys = self.keys()
        return connect(self.names, keys, self.wait)


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
