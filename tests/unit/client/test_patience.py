"""A driver's wait for another driver's lease, depending on the daemon's reports."""

from typing import Literal

import pytest

from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import ErrorCode, ErrorScope, LeaseHeldError
from rpc_schema.lease import LeaseStatus
from worker_client.errors import remote_error
from worker_client.wire.lease import Patience


class Clock:
    """Of the driver that waits, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("worker_client.wire.lease.time", made)
    return made


def refusal(
    remaining_s: float, rank: int = 0, state: Literal["held", "claimable"] = "held"
) -> LeaseHeldError:
    reply = ControlErrorReply(
        call=1,
        code=ErrorCode.LEASE_HELD,
        scope=ErrorScope.WORKER,
        message="held",
        lease=LeaseStatus(state=state, ttl_ms=3000, remaining_ms=round(remaining_s * 1000)),
    )
    error = remote_error(reply, rank=rank, endpoint=f"ipc:///w{rank}")
    assert isinstance(error, LeaseHeldError)
    return error


def wait_through(patience: Patience, *remaining_s: float) -> None:
    for seconds in remaining_s:
        patience.wait(refusal(seconds))


def test_time_that_a_busy_daemon_does_not_count_is_no_renewal(clock: Clock) -> None:
    patience = Patience(60.0)
    for left_s in (0.5, 0.5, 0.4, 0.4, 0.4, 0.1, 0.1):
        wait_through(patience, left_s)
        clock.now += 1.5  # the daemon was stopped


def test_holder_that_renews_is_not_waited_for(clock: Clock) -> None:
    patience = Patience(60.0)
    wait_through(patience, 2.4, 2.9, 2.65, 2.4)  # once may have been its last words
    with pytest.raises(LeaseHeldError):
        wait_through(patience, 2.15, 2.9)


def test_ranks_are_not_mistaken_for_each_other(clock: Clock) -> None:
    patience = Patience(60.0)
    for _ in range(4):
        patience.wait(refusal(0.3, rank=0))
        patience.wait(refusal(0.9, rank=1))


def test_wait_ends_with_its_time_although_the_lease_lasts(clock: Clock) -> None:
    patience = Patience(1.0)
    with pytest.raises(LeaseHeldError):
        wait_through(patience, *[30.0] * 60)
    assert 51.0 <= clock.now < 51.1


def test_without_time_nothing_is_waited_for(clock: Clock) -> None:
    with pytest.raises(LeaseHeldError):
        Patience(0.0).wait(refusal(0.1))
    assert clock.now == 50.0


def test_drivers_that_attach_are_no_holder_that_renews(clock: Clock) -> None:
    patience = Patience(60.0)
    for left_s in (0.1, 1.0, 0.1, 1.0, 0.1, 1.0):
        patience.wait(refusal(left_s, state="claimable"))
