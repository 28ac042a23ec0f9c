"""What a driver asks for as it attaches: how long its lease lasts, and by which name others hear of
it. Knows no socket."""

import os
import socket
from dataclasses import dataclass

from rpc_schema.lease import (
    DEFAULT_LEASE_TTL_MS,
    DEFAULT_ORPHAN_KV_TTL_MS,
    MAX_LEASE_TTL_MS,
    MAX_ORPHAN_KV_TTL_MS,
    MIN_LEASE_TTL_MS,
)
from worker_client.errors import ClientConfigError


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a driver asks of the daemons that it attaches to."""

    ttl_s: float = DEFAULT_LEASE_TTL_MS / 1000
    """1 to 60: so long daemons wait for a sign of life before they let another driver in."""
    orphan_kv_ttl_s: float = DEFAULT_ORPHAN_KV_TTL_MS / 1000
    """0 to 3600: so long they keep the requests after that. Weights stay for ever."""
    heartbeat_timeout_s: float | None = None
    """None: the lease is renewed as long as the group is open and the thread that attached it
    lives. Otherwise the application must also have called `WorkerGroup.heartbeat` within this
    time."""

    def __post_init__(self) -> None:
        """Raise ClientConfigError if a time is out of bounds."""
        for field, value, low, high in (
            ("ttl_s", self.ttl_s, MIN_LEASE_TTL_MS / 1000, MAX_LEASE_TTL_MS / 1000),
            ("orphan_kv_ttl_s", self.orphan_kv_ttl_s, 0.0, MAX_ORPHAN_KV_TTL_MS / 1000),
            ("heartbeat_timeout_s", self.heartbeat_timeout_s or 1.0, 0.0, float("inf")),
        ):
            if not low <= value <= high:
                raise ClientConfigError(
                    "the time is out of bounds",
                    field=field,
                    value=value,
                    fix=f"use {low:g} to {high:g} seconds",
                )


def holder_name() -> str:
    """Return HOST:PID of this process, as other drivers are told it."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}"
