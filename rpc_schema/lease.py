"""Who may step a daemon, and for how long: the lease that attach grants, its renewal, and how it
looks from outside. Knows neither epochs' order nor steps."""

import hashlib
from typing import Annotated, Final, Literal

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Uid, Unsigned, Value

LeaseState = Literal["free", "held", "orphan"]
"""free: nobody's, a driver may attach at once. held: its holder renews it. orphan: it has expired;
steps are refused, weights and KV cache stay, anybody may attach."""

MIN_LEASE_TTL_MS = 1_000
MAX_LEASE_TTL_MS = 60_000
DEFAULT_LEASE_TTL_MS = 3_000
MAX_ORPHAN_KV_TTL_MS = 3_600_000
DEFAULT_ORPHAN_KV_TTL_MS = 60_000

HolderName = Annotated[str, Meta(max_length=128)]
"""HOST:PID of a driver, for people; proves nothing."""


class LeaseStatus(Value, frozen=True, kw_only=True):
    """A daemon's lease at one moment."""

    state: LeaseState
    holder: Annotated[bytes, Meta(max_length=16)] = b""
    """driver_digest of the driver that holds it, or held it before it expired; empty where it is
    free. Never the driver's id itself."""
    holder_name: HolderName = ""
    epoch: Unsigned = 0
    """The holder's."""
    ttl_ms: Count = 0
    remaining_ms: Count = 0
    """Until it expires, unless it is renewed; 0 unless held."""
    orphan_kv_remaining_ms: Count = 0
    """Until the requests that its last holder left are dropped; 0 unless orphan."""


FREE_LEASE = LeaseStatus(state="free")

DIGEST_BYTES: Final = 8


def driver_digest(driver_id: bytes) -> bytes:
    """Return what others are shown of a driver's id."""
    return hashlib.sha256(driver_id).digest()[:DIGEST_BYTES]


class RenewLease(ControlRequest["RenewLeaseReply"], frozen=True, tag=9, kw_only=True):
    """The holder is alive: its lease lasts its full time from now on. Nobody else can renew it, nor
    can the holder once it has expired."""

    driver_id: Uid
    epoch: Unsigned


class RenewLeaseReply(ControlReply, frozen=True, tag=9, kw_only=True):
    """Renewed."""

    remaining_ms: Count
