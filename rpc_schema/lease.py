"""The lease, by which attach allows one driver to run steps on a daemon: its renewal, and its
public state."""

from typing import Annotated, Literal

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Uid, Unsigned, Value

LeaseState = Literal["free", "held", "claimable", "orphan"]
"""free: a driver may attach at once. held: its holder is there. claimable: its holder's connection
has ended, though not surely its process; any driver may attach, and until one does, the holder goes
on as soon as it is back. orphan: the holder has ended or has been silent for too long; steps are
refused, weights and KV cache stay, any driver may attach."""

MIN_LEASE_TTL_MS = 1_000
MAX_LEASE_TTL_MS = 60_000
DEFAULT_LEASE_TTL_MS = 30_000
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
    """Time until it expires, unless it is renewed; 0 unless held or claimable."""
    orphan_kv_remaining_ms: Count = 0
    """Time until the requests of its last holder are dropped; 0 unless orphan."""
    silent_ms: Count = 0
    """Time since the holder's last renewal; 0 unless held or claimable."""


FREE_LEASE = LeaseStatus(state="free")


class RenewLease(ControlRequest["RenewLeaseReply"], frozen=True, tag=9, kw_only=True):
    """Renew the holder's lease for its full time from now on. Only the holder can renew it, and
    only before it has expired."""

    driver_id: Uid
    epoch: Unsigned
    yields: bool = False
    """The driver's application has ended or hangs: instead of being renewed, the lease becomes
    claimable, until a renewal without this."""


class RenewLeaseReply(ControlReply, frozen=True, tag=9, kw_only=True):
    """The lease was renewed, unless it is being claimed."""

    remaining_ms: Count
    is_claimed: bool = False
    """Another driver is attaching, because the holder's connection had ended: the lease was not
    renewed. Ask again: the other driver gets it, or gives up within a second."""
