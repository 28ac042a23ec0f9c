"""The lease's states as a table: the effect of each event in each state, with a simulated clock."""

import pytest

from rpc_schema.driver_digest import driver_digest
from rpc_schema.errors import (
    ConfigError,
    FencedError,
    ForbiddenError,
    LeaseExpiredError,
    LeaseHeldError,
    NotAttachedError,
)
from rpc_schema.lease import FREE_LEASE
from worker_daemon.server.session.lease import DriverIdentity, Lease, LeaseRequest, lease_terms

A, B = DriverIdentity("key", b"a" * 16), DriverIdentity("key", b"b" * 16)
THIEF = DriverIdentity("another key", A.driver_id)
TERMS = LeaseRequest(3.0, 60.0, "host:1")
NAME_OF_A = rf"host:1 \(driver {driver_digest(A.driver_id).hex()[:8]}\)"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A lease whose owner looks at it four times a second, as the control thread does."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.suspended = Clock()
        self.lease = Lease(self.clock, self.suspended)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.clock.now += 0.25
            self.lease.status()

    def to(self, state: str) -> Lease:
        """Driver A of epoch 5 leaves it in this state."""
        if state != "fresh":
            self.lease.grant(A, 5, TERMS)
        if state == "orphan":
            self.wait(3)
        if state == "free":
            assert self.lease.release(5)
        return self.lease


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("state", "driver", "force", "free"),
    [
        ("fresh", A, False, True),
        ("fresh", B, False, True),
        ("held", A, False, True),
        ("held", B, False, False),
        ("held", B, True, True),
        ("held", THIEF, False, False),
        ("held", THIEF, True, True),
        ("orphan", A, False, True),
        ("orphan", B, False, True),
        ("orphan", THIEF, False, True),
        ("free", A, False, True),
        ("free", B, False, True),
    ],
)
def test_who_may_attach(
    watched: Watched, state: str, driver: DriverIdentity, force: bool, free: bool
) -> None:
    lease = watched.to(state)
    before = lease.status()
    if free:
        lease.check_free_for(driver, force=force)
    else:
        with pytest.raises(LeaseHeldError, match=f"{NAME_OF_A} holds the lease of") as caught:
            lease.check_free_for(driver, force=force)
        assert caught.value.lease == before
    assert lease.status() == before


@pytest.mark.parametrize(
    ("state", "driver", "epoch", "error"),
    [
        ("fresh", A, 5, NotAttachedError),
        ("held", A, 5, None),
        ("held", A, 4, FencedError),
        ("held", A, 6, NotAttachedError),
        ("held", A, 0, FencedError),
        ("held", B, 5, FencedError),
        ("held", THIEF, 5, FencedError),
        ("orphan", A, 5, LeaseExpiredError),
        ("orphan", A, 4, FencedError),
        ("orphan", A, 6, NotAttachedError),
        ("free", A, 5, NotAttachedError),
        ("free", A, 4, FencedError),
    ],
)
def test_who_may_renew(
    watched: Watched, state: str, driver: DriverIdentity, epoch: int, error: type[Exception] | None
) -> None:
    lease = watched.to(state)
    before = lease.status()
    watched.wait(1)
    if error is None:
        assert lease.renew(driver, epoch)
        assert lease.status() == before
        return
    with pytest.raises(error):
        lease.renew(driver, epoch)
    after = lease.status()
    assert (after.state, after.epoch, after.holder) == (before.state, before.epoch, before.holder)
    assert after.remaining_ms <= before.remaining_ms


def test_fenced_driver_learns_who_has_attached(watched: Watched) -> None:
    lease = watched.to("held")
    with pytest.raises(FencedError, match=f"epoch 4 is fenced: {NAME_OF_A} has attached as"):
        lease.renew(B, 4)
    lease.grant(B, 6, LeaseRequest(3.0, 60.0))
    with pytest.raises(FencedError, match=r"is fenced: driver [0-9a-f]{8} has attached as epoch 6"):
        lease.need_held(5)


def test_renewed_in_time_it_never_expires_and_unrenewed_it_does_at_once(watched: Watched) -> None:
    lease = watched.to("held")
    for _ in range(10):
        watched.wait(2.75)
        lease.renew(A, 5)
    assert lease.take_expiry() == 0
    watched.wait(2.75)
    assert lease.status().remaining_ms == 250
    watched.wait(0.25)
    assert lease.status().state == "orphan"
    assert [lease.take_expiry(), lease.take_expiry()] == [5, 0]


def test_requests_stay_for_their_time_after_the_expiry(watched: Watched) -> None:
    lease = watched.to("orphan")
    assert lease.take_expiry() == 5
    watched.wait(59.75)
    assert lease.take_kv_end() == 0
    assert lease.status().orphan_kv_remaining_ms == 250
    watched.wait(0.25)
    assert [lease.take_kv_end(), lease.take_kv_end()] == [5, 0]
    assert lease.status().state == "orphan"


def test_who_attaches_in_time_finds_them(watched: Watched) -> None:
    lease = watched.to("orphan")
    watched.wait(59)
    lease.grant(B, 6, TERMS)
    lease.renew(B, 6)
    for _ in range(4):
        watched.wait(2)
        lease.renew(B, 6)
    assert (lease.take_expiry(), lease.take_kv_end()) == (0, 0)


@pytest.mark.parametrize("state", ["held", "orphan"])
def test_given_back_it_is_free_at_once(watched: Watched, state: str) -> None:
    lease = watched.to(state)
    assert not lease.release(4)
    assert not lease.release(6)
    assert lease.status().state == state
    assert lease.release(5)
    assert lease.status() == FREE_LEASE
    assert not lease.release(5)
    assert [lease.was_released(epoch) for epoch in (4, 5, 6)] == [False, True, False]
    watched.wait(100)
    assert (lease.take_expiry(), lease.take_kv_end()) == (0, 0)


@pytest.mark.parametrize("state", ["held", "orphan", "free"])
def test_epoch_is_its_owner_s_also_once_its_lease_has_ended(watched: Watched, state: str) -> None:
    lease = watched.to(state)
    lease.check_owner(A.owner, 5)
    lease.check_owner(THIEF.owner, 4)
    with pytest.raises(ForbiddenError, match=rf"{NAME_OF_A} attached with another key.*epoch = 5"):
        lease.check_owner(THIEF.owner, 5)


def test_status_tells_the_holder_and_the_time_left(watched: Watched) -> None:
    lease = watched.to("held")
    watched.wait(1)
    status = lease.status()
    assert (status.state, status.holder, status.holder_name, status.epoch) == (
        "held",
        driver_digest(A.driver_id),
        "host:1",
        5,
    )
    assert (status.ttl_ms, status.remaining_ms, status.orphan_kv_remaining_ms) == (3000, 2000, 0)


def test_time_in_which_nobody_looked_does_not_count(watched: Watched) -> None:
    """The control thread was stopped, or kept from the interpreter: renewals wait unread."""
    lease = watched.to("held")
    watched.wait(1)
    watched.clock.now += 30
    assert lease.status().remaining_ms == 2000
    lease.renew(A, 5)
    watched.wait(3)
    assert lease.status().state == "orphan"


def test_time_in_which_the_host_was_suspended_counts(watched: Watched) -> None:
    lease = watched.to("held")
    watched.wait(1)
    watched.suspended.now += 1.5
    assert lease.status().remaining_ms == 500
    watched.suspended.now += 30
    with pytest.raises(LeaseExpiredError):
        lease.renew(A, 5)
    assert lease.status().state == "orphan" and lease.take_expiry() == 5


def test_clocks_that_are_not_read_at_the_same_moment_suspend_nothing(watched: Watched) -> None:
    lease = watched.to("held")
    for _ in range(100):
        watched.suspended.now += 0.001
        assert lease.status().remaining_ms == 3000


# A holder whose connection has ended, and drivers that claim its lease.


def test_holder_without_a_connection_goes_on_once_it_is_back(watched: Watched) -> None:
    lease = watched.to("held")
    assert not lease.contact_lost(4)
    assert lease.contact_lost(5) and not lease.contact_lost(5)
    assert lease.status().state == "claimable"
    lease.need_held(5)  # its steps pass
    lease.check_free_for(B, force=False)
    assert lease.contact_returned(5) and not lease.contact_returned(5)
    with pytest.raises(LeaseHeldError):
        lease.check_free_for(B, force=False)


def test_renewal_ends_the_doubt(watched: Watched) -> None:
    lease = watched.to("held")
    lease.contact_lost(5)
    assert lease.renew(A, 5)
    assert lease.status().state == "held"
    assert lease.renew(A, 5, yields=True)
    assert lease.status().state == "claimable"


def test_silence_is_told_and_ends_a_claimable_lease_too(watched: Watched) -> None:
    lease = watched.to("held")
    lease.contact_lost(5)
    watched.wait(2)
    assert lease.status().silent_ms == 2000
    watched.wait(1)
    assert (lease.status().state, lease.status().silent_ms) == ("orphan", 0)
    assert lease.take_expiry() == 5


def test_refusal_tells_a_silent_holder(watched: Watched) -> None:
    lease = watched.to("held")
    watched.wait(2)
    with pytest.raises(LeaseHeldError, match=f"{NAME_OF_A} has been silent for 2 s and holds"):
        lease.check_free_for(B, force=False)


def test_process_that_has_ended_leaves_an_orphan_at_once(watched: Watched) -> None:
    lease = watched.to("held")
    lease.holder_ended(4)
    assert lease.status().state == "held"
    lease.holder_ended(5)
    status = lease.status()
    assert (status.state, status.orphan_kv_remaining_ms) == ("orphan", 60_000)
    assert [lease.take_expiry(), lease.take_expiry()] == [5, 0]
    with pytest.raises(LeaseExpiredError):
        lease.renew(A, 5)


@pytest.mark.parametrize("state", ["fresh", "free", "orphan", "claimable"])
def test_claim_keeps_others_out_for_a_moment(watched: Watched, state: str) -> None:
    lease = watched.to("held" if state == "claimable" else state)
    lease.contact_lost(5)
    lease.check_free_for(B, force=False)
    lease.claim(B, 6, force=False)
    with pytest.raises(LeaseHeldError, match=r"driver [0-9a-f]{8} is attaching as epoch 6") as told:
        lease.check_free_for(THIEF, force=False)
    assert told.value.lease is not None
    assert told.value.lease.holder == driver_digest(B.driver_id)
    lease.check_free_for(THIEF, force=True)
    watched.wait(1)
    lease.check_free_for(THIEF, force=False)
    lease.check_claim(B, 6)  # late, but nobody has come between


def test_holder_that_is_back_during_a_claim_waits_for_its_end(watched: Watched) -> None:
    lease = watched.to("held")
    lease.contact_lost(5)
    lease.claim(B, 6, force=False)
    assert not lease.renew(A, 5)
    assert not lease.contact_returned(5)
    assert lease.give_up(6) and not lease.give_up(6)
    assert lease.renew(A, 5)
    with pytest.raises(LeaseHeldError):
        lease.check_claim(B, 6)


def test_claim_that_is_overdue_yields_to_a_holder_that_is_back(watched: Watched) -> None:
    lease = watched.to("held")
    lease.contact_lost(5)
    lease.claim(B, 6, force=False)
    watched.wait(1)
    assert lease.contact_returned(5)
    with pytest.raises(LeaseHeldError):
        lease.check_claim(B, 6)
    lease.claim(B, 7, force=True)
    watched.wait(1)
    lease.check_claim(B, 7)


def test_claim_by_force_takes_nothing_before_it_is_granted(watched: Watched) -> None:
    lease = watched.to("held")
    lease.claim(B, 6, force=True)
    assert lease.renew(A, 5)
    lease.grant(B, 6, TERMS)
    with pytest.raises(FencedError):
        lease.renew(A, 5)


def test_claim_s_time_stands_still_with_the_daemon(watched: Watched) -> None:
    lease = watched.to("held")
    lease.contact_lost(5)
    lease.claim(B, 6, force=False)
    watched.clock.now += 30
    assert not lease.renew(A, 5)
    lease.check_claim(B, 6)


def test_claimed_epoch_is_its_owner_s(watched: Watched) -> None:
    lease = watched.to("free")
    lease.claim(B, 6, force=False)
    lease.check_owner(B.owner, 6)
    with pytest.raises(ForbiddenError, match="epoch = 6"):
        lease.check_owner(THIEF.owner, 6)


@pytest.mark.parametrize(
    ("ttl_ms", "kv_ms", "field"),
    [
        (999, 0, "lease_ttl_ms"),
        (60_001, 0, "lease_ttl_ms"),
        (0, 0, "lease_ttl_ms"),
        (3000, 3_600_001, "orphan_kv_ttl_ms"),
    ],
)
def test_terms_out_of_bounds_are_refused_by_name(ttl_ms: int, kv_ms: int, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = .*fix: use") as caught:
        lease_terms(ttl_ms, kv_ms, "")
    assert caught.value.field == field


@pytest.mark.parametrize(("ttl_ms", "kv_ms"), [(1000, 0), (60_000, 3_600_000)])
def test_terms_at_their_bounds(ttl_ms: int, kv_ms: int) -> None:
    assert lease_terms(ttl_ms, kv_ms, "x") == LeaseRequest(ttl_ms / 1000, kv_ms / 1000, "x")
