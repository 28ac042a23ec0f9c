"""The lease: grants one driver the right to send steps, and tracks what follows its end. A state
machine; its clocks are parameters. Owned by the control thread.

It ends when the holder's process does, when the holder has been silent for its whole time, or when
another driver attaches after the holder's connection has ended. contact.py reports the ends of
processes and connections.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from rpc_schema import lease as ls
from rpc_schema.driver_digest import driver_digest
from rpc_schema.errors import (
    FencedError,
    ForbiddenError,
    LeaseExpiredError,
    LeaseHeldError,
    NotAttachedError,
)
from worker_daemon.errors import config_error
from worker_host.plain_text import one_line

MAX_SILENCE_S: Final = 1.0
"""The owner checks the lease four times a second. After a longer gap the daemon did not run and
could not receive renewals: that time does not count. Time in which the whole host was suspended
does count: its driver, on another host, kept running."""
MIN_SUSPENSION_S: Final = 0.1
"""A smaller difference can result from reading the two clocks at different moments."""


CLAIM_S: Final = 1.0
"""Time that a driver whose attach is prepared on all ranks has to commit it: meanwhile no other
driver gets the lease, nor does a holder whose connection had ended."""
NOTABLE_SILENCE_S: Final = 2.0
"""Silence of a holder that a refusal mentions: drivers renew more often."""

MAX_NAME_BYTES: Final = 128
"""Limit of a holder's stored name."""


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The terms that a driver asks for when it attaches."""

    ttl_s: float
    orphan_kv_ttl_s: float
    holder_name: str = ""


class DriverIdentity(NamedTuple):
    """A driver's id, and the owner that the handshake proved. The id alone proves nothing."""

    owner: str
    """A public key or, without keys, a user."""
    driver_id: bytes


@dataclass(frozen=True, slots=True)
class _Holder:
    """A driver and its lease."""

    driver: DriverIdentity
    epoch: int
    terms: LeaseRequest

    @property
    def digest(self) -> bytes:
        """Digest of its id, which other drivers may see."""
        return driver_digest(self.driver.driver_id)

    def __str__(self) -> str:
        driver = f"driver {self.digest.hex()[:8]}"
        return f"{self.terms.holder_name} ({driver})" if self.terms.holder_name else driver


@dataclass(frozen=True, slots=True)
class _Claim:
    """A prepared attach."""

    driver: DriverIdentity
    epoch: int
    forced: bool
    ends: float


_LASTING: Final = ("held", "claimable")
"""States in which the holder's requests pass."""


def lease_terms(ttl_ms: int, orphan_kv_ttl_ms: int, holder_name: str) -> LeaseRequest:
    """Return the lease terms of a message.

    Raises:
        ConfigError: a time is out of bounds.
    """
    for field, value, low, high in (
        ("lease_ttl_ms", ttl_ms, ls.MIN_LEASE_TTL_MS, ls.MAX_LEASE_TTL_MS),
        ("orphan_kv_ttl_ms", orphan_kv_ttl_ms, 0, ls.MAX_ORPHAN_KV_TTL_MS),
    ):
        if not low <= value <= high:
            fix = f"use {low} to {high} milliseconds"
            raise config_error(field, value, "the time is outside its bounds", fix)
    name = one_line(holder_name, MAX_NAME_BYTES)
    return LeaseRequest(ttl_ms / 1000, orphan_kv_ttl_ms / 1000, name)


def suspended_s() -> float:
    """Return the time for which this host has been suspended since its start, from Linux's two
    clocks."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


class Lease:
    """The state machine: FREE -> HELD (grant) -> ORPHAN (expired) or FREE (release); HELD ->
    CLAIMABLE (its connection ended) and back (it is there again); CLAIMABLE ends as HELD does. A
    grant leads from any state to HELD. Every method first applies the time that has passed."""

    def __init__(self, clock: Callable[[], float], suspended: Callable[[], float] = float) -> None:
        """clock: monotonic seconds, as time.monotonic. suspended: seconds for which the host has
        been suspended so far, which the clock does not count."""
        self._clock = clock
        self._suspended = suspended
        self._suspended_s = suspended()
        self._state: ls.LeaseState = "free"
        self._holder: _Holder | None = None
        self._claim: _Claim | None = None
        self._renewed = 0.0
        self._ends = 0.0
        self._kv_ends = 0.0
        self._last_look = clock()
        self._unheard_expiry = False
        self._unheard_kv_end = False

    @property
    def holder(self) -> str:
        """Name of the driver that has, or had last, the lease, for messages; empty: none yet."""
        return "" if self._holder is None else str(self._holder)

    def check_free_for(self, driver: DriverIdentity, *, force: bool) -> None:
        """Raise LeaseHeldError if another driver holds the lease or is attaching, unless
        `force`."""
        now = self._look()
        if force:
            return
        claim = self._claim_at(now)
        if claim is not None and claim.driver != driver:
            raise _is_claimed(claim, now)
        holder = self._holder
        if self._state != "held" or holder is None or holder.driver == driver:
            return
        remaining_ms, silent_s = _ms(self._ends - now), now - self._renewed
        silence = f"has been silent for {silent_s:.0f} s and "
        raise LeaseHeldError(
            f"{holder} {silence if silent_s >= NOTABLE_SILENCE_S else ''}"
            f"holds the lease of epoch {holder.epoch}, for another "
            f"{remaining_ms / 1000:.1f} s unless it renews it",
            fix="wait until it is free, or attach by force",
            lease=self.status(),
        )

    def claim(self, driver: DriverIdentity, epoch: int, *, force: bool) -> None:
        """Record a prepared attach, which `check_free_for` allows. Until it is granted, given up or
        overdue, other drivers are refused, and a claimable lease is not renewed."""
        self._claim = _Claim(driver, epoch, force, self._look() + CLAIM_S)

    def check_claim(self, driver: DriverIdentity, epoch: int) -> None:
        """Raise LeaseHeldError if a prepared attach may not be granted any more: it is overdue, and
        meanwhile the holder has come back, or another driver is attaching."""
        now, claim = self._look(), self._claim
        if claim is None or (claim.driver, claim.epoch) != (driver, epoch):
            self.check_free_for(driver, force=False)
        elif now >= claim.ends:
            self.check_free_for(driver, force=claim.forced)

    def give_up(self, epoch: int) -> bool:
        """Give up the prepared attach of `epoch`; return True if it was not granted yet."""
        if self._claim is None or self._claim.epoch != epoch:
            return False
        self._claim = None
        return True

    def grant(self, driver: DriverIdentity, epoch: int, terms: LeaseRequest) -> None:
        """Grant the lease to a driver, even if another one holds it. epoch: above all earlier
        ones."""
        now = self._look()
        self._holder = _Holder(driver, epoch, terms)
        self._claim = None
        self._state = "held"
        self._renewed = now
        self._ends = now + terms.ttl_s
        self._unheard_expiry = self._unheard_kv_end = False

    def check_owner(self, owner: str, epoch: int) -> None:
        """Raise ForbiddenError if the lease of `epoch` was granted to another owner, even if it has
        ended, or another owner is attaching under this epoch."""
        claim = self._claim
        if claim is not None and claim.epoch == epoch and claim.driver.owner != owner:
            problem = "a driver with another key, or of another user, is attaching under this epoch"
            raise ForbiddenError(problem, field="epoch", value=epoch, fix="prepare another epoch")
        holder = self._holder
        if holder is not None and holder.epoch == epoch and holder.driver.owner != owner:
            problem = f"{holder} attached with another key, or as another user"
            fix = "attach: an epoch is for the key that it was granted to"
            raise ForbiddenError(problem, field="epoch", value=epoch, fix=fix)

    def renew(self, driver: DriverIdentity, epoch: int, *, yields: bool = False) -> bool:
        """Renew the lease for its full time from now on; return False if another driver is claiming
        it, so that it was not renewed. yields: make it claimable instead. Raises as `need_held`
        does."""
        now = self._look()
        self.need_held(epoch)
        holder = self._holder
        assert holder is not None
        if holder.driver != driver:
            raise FencedError(f"{holder} holds the lease of epoch {epoch}", fix="attach")
        if self._state == "claimable" and self._claim_at(now) is not None:
            return False
        if yields:
            self._state = "claimable"
            return True
        self._state = "held"
        self._renewed = now
        self._ends = now + holder.terms.ttl_s
        return True

    def contact_lost(self, epoch: int) -> bool:
        """Make the lease of `epoch` claimable, as its holder's connection has ended; return True if
        it was held until now."""
        self._look()
        if self._state != "held" or self._holder is None or self._holder.epoch != epoch:
            return False
        self._state = "claimable"
        return True

    def contact_returned(self, epoch: int) -> bool:
        """Let the holder go on, as it has a connection again; return False if another driver is
        claiming the lease, or the lease of `epoch` is not claimable."""
        now = self._look()
        if self._state != "claimable" or self._holder is None or self._holder.epoch != epoch:
            return False
        if self._claim_at(now) is not None:
            return False
        self._state = "held"
        return True

    def holder_ended(self, epoch: int) -> None:
        """End the lease of `epoch`, as its holder's process has ended."""
        now = self._look()
        if self._state in _LASTING and self._holder is not None and self._holder.epoch == epoch:
            self._expire(now)

    def need_held(self, epoch: int) -> None:
        """Raise unless the driver of `epoch` holds the lease.

        Raises:
            FencedError: a driver of a higher epoch has attached since.
            LeaseExpiredError: it was not renewed in time.
            NotAttachedError: the epoch has no lease: never granted, or given back.
        """
        self._look()
        held = 0 if self._holder is None else self._holder.epoch
        if epoch < held:
            problem = f"epoch {epoch} is fenced: {self._holder} has attached as epoch {held}"
            raise FencedError(problem, fix="attach")
        if epoch > held or epoch == 0 or self._state == "free":
            raise NotAttachedError(f"epoch {epoch} is not attached", fix="attach")
        if self._state == "orphan":
            raise LeaseExpiredError(f"the lease of epoch {epoch} has expired", fix="attach again")

    def release(self, epoch: int) -> bool:
        """Release the lease of `epoch`, even if it has expired; return True if there was one."""
        self._look()
        if self._state == "free" or self._holder is None or self._holder.epoch != epoch:
            return False
        self._state = "free"
        self._unheard_expiry = self._unheard_kv_end = False
        return True

    def was_released(self, epoch: int) -> bool:
        """Return True if `epoch` was the last one with a lease, and released it."""
        return self._state == "free" and self._holder is not None and self._holder.epoch == epoch

    def take_expiry(self) -> int:
        """Return the epoch of a lease that has expired, once; 0 if there is none."""
        self._look()
        if not self._unheard_expiry or self._holder is None:
            return 0
        self._unheard_expiry = False
        return self._holder.epoch

    def take_kv_end(self) -> int:
        """Return the epoch whose requests were kept for their full time after the expiry, once; 0
        if there is none."""
        now = self._look()
        if not self._unheard_kv_end or self._holder is None or now < self._kv_ends:
            return 0
        self._unheard_kv_end = False
        return self._holder.epoch

    def status(self) -> ls.LeaseStatus:
        """Return the lease's status."""
        now = self._look()
        holder = self._holder
        if self._state == "free" or holder is None:
            return ls.FREE_LEASE
        kept_s = self._kv_ends - now if self._state == "orphan" else 0.0
        return ls.LeaseStatus(
            state=self._state,
            holder=holder.digest,
            holder_name=holder.terms.holder_name,
            epoch=holder.epoch,
            ttl_ms=_ms(holder.terms.ttl_s),
            remaining_ms=_ms(self._ends - now) if self._state in _LASTING else 0,
            orphan_kv_remaining_ms=_ms(kept_s),
            silent_ms=_ms(now - self._renewed) if self._state in _LASTING else 0,
        )

    def _claim_at(self, now: float) -> _Claim | None:
        """Return the claim, if it is not overdue."""
        claim = self._claim
        return claim if claim is not None and now < claim.ends else None

    def _look(self) -> float:
        """Apply the time that has passed; return the time."""
        now = self._clock()
        silence = now - self._last_look
        self._last_look = now
        suspended_s = self._suspended()
        asleep_s, self._suspended_s = suspended_s - self._suspended_s, suspended_s
        if self._claim is not None and silence > MAX_SILENCE_S:
            self._claim = replace(self._claim, ends=self._claim.ends + silence)
        if self._state not in _LASTING:
            return now
        if silence > MAX_SILENCE_S:
            self._ends += silence
            self._renewed += silence
        if asleep_s >= MIN_SUSPENSION_S:
            self._ends -= asleep_s
        if now >= self._ends:
            self._expire(self._ends)
        return now

    def _expire(self, at: float) -> None:
        assert self._holder is not None
        self._state = "orphan"
        self._kv_ends = at + self._holder.terms.orphan_kv_ttl_s
        self._unheard_expiry = self._unheard_kv_end = True


def _is_claimed(claim: _Claim, now: float) -> LeaseHeldError:
    """Return the refusal of a driver while another one attaches."""
    digest, remaining_ms = driver_digest(claim.driver.driver_id), _ms(claim.ends - now)
    return LeaseHeldError(
        f"driver {digest.hex()[:8]} is attaching as epoch {claim.epoch}",
        fix="wait until the lease is free, or attach by force",
        lease=ls.LeaseStatus(
            state="claimable",
            holder=digest,
            epoch=claim.epoch,
            ttl_ms=_ms(CLAIM_S),
            remaining_ms=remaining_ms,
        ),
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
