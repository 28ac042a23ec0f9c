"""The lease, by which attach allows one driver to run steps on a daemon: its renewal, and its
public state."""

import hashlib
from typing import Annotated, Final, Literal

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Uid, Unsigned, Value

LeaseState = Literal["free", "held", "orphan"]
"""free: a driver may attach at once. held: its holder renews it. orphan: it has expired; steps are
refused, weights and KV cache stay, any driver may attach."""

MIN_LEASE_TTL_MS = 1_000
MAX_LEASE_TTL_MS = 60_000
DEFAULT_LEASE_TTL_MS = 3_000
MAX_ORPHAN_KV_TTL_MS = 3_600_000
DEFAULT_ORPHAN_KV_TTL_MS = 60_000

HolderName = Annotated[str, Meta(max_length=128)]
"""HOST:PID of a driver, for people to read; not authenticated."""


class LeaseStatus(Value, frozen=True, kw_only=True):
    """A daemon's lease at one moment."""

    state: LeaseState
    holder: Annotated[bytes, Meta(max_length=16)] = b""
    """driver_digest of the driver that holds the lease, or held it before it expired; empty if
    free. Never the driver's id itself."""
    holder_name: HolderName = ""
    epoch: Unsigned = 0
    """Epoch of the holder."""
    ttl_ms: Count = 0
    remaining_ms: Count = 0
    """Time until it expires, unless it is renewed; 0 unless held."""
    orphan_kv_remaining_ms: Count = 0
    """Time until the requests of its last holder are dropped; 0 unless orphan."""


FREE_LEASE = LeaseStatus(state="free")

DIGEST_BYTES: Final = 8


def driver_digest(driver_id: bytes) -> bytes:
    """Return the digest of a driver's id, which others may see."""
    return hashlib.sha256(driver_id).digest()[:DIGEST_BYTES]


class RenewLease(ControlRequest["RenewLeaseReply"], frozen=True, tag=9, kw_only=True):
    """Renew the holder's lease for its full time from now on. Only the holder can renew it, and
    only before it has expired."""

    driver_id: Uid
    epoch: Unsigned


class RenewLeaseReply(ControlReply, frozen=True, tag=9, kw_only=True):
    """The lease was renewed."""

    remaining_ms: Count
