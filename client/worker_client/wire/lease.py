"""The driver's side of the lease: the thread that renews it on every daemon of a group while the
application is alive, the knowledge of whether the lease is still ours, and the wait for the end of
another driver's lease."""

import contextlib
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rpc_schema.codec import DRIVER_OPERATIONS
from rpc_schema.errors import LeaseHeldError, WireError, WorkerError
from rpc_schema.lease import (
    DEFAULT_LEASE_TTL_MS,
    DEFAULT_ORPHAN_KV_TTL_MS,
    MAX_LEASE_TTL_MS,
    MAX_ORPHAN_KV_TTL_MS,
    MIN_LEASE_TTL_MS,
    RenewLease,
    RenewLeaseReply,
)
from worker_client.errors import (
    AuthenticationError,
    DeadlineExceeded,
    LeaseNotRenewed,
    OutOfThreads,
    WorkerDied,
    config_error,
)
from worker_client.wire.control_channel import ControlChannel, PendingCall
from worker_client.wire.endpoint import Endpoint
from worker_client.wire.sockets import Context

RENEWALS_PER_TTL = 4
RENEWAL_S = 0.75
"""Longest interval between renewals: by them a waiting driver sees that the holder lives."""
OWNER_CHECK_S = 0.1
"""Interval at which the keeper checks whether its application lives."""
CLAIMED_RETRY_S = 0.02
"""Wait before the next renewal while another driver claims the lease."""
STOP_CHECK_S = 0.05
"""Interval at which a wait for replies checks whether the keeper is to stop."""
POLL_S = 0.05
"""Interval at which a waiting driver asks again: shorter than the shortest renewal interval, or
each check would find as much time left as the one before."""
EXPIRY_SLACK_S = 0.01
"""Wait beyond the announced expiry, which is rounded to milliseconds."""
RENEWAL_SLACK_S = 0.02
"""Growth of the remaining time from which it counts as a renewal; less may be rounding. If it
shrinks by less than the time that passed, that is no sign of one: a daemon does not count time in
which it could not check the lease."""
RENEWALS_OF_THE_LIVING = 2
"""Number of renewals that prove that the holder lives: the first may have been in transit when its
sender died."""


_ASK_AGAIN = (DeadlineExceeded, WireError, AuthenticationError, WorkerDied)
"""Errors of a renewal that may pass while the lease lasts: the group's thread judges who is
dead."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """Terms of the lease that a driver asks its daemons for."""

    ttl_s: float = DEFAULT_LEASE_TTL_MS / 1000
    """Time without a renewal after which daemons accept another driver, 1 to 60. They accept one
    sooner if this process or its connection ends."""
    orphan_kv_ttl_s: float = DEFAULT_ORPHAN_KV_TTL_MS / 1000
    """Time for which daemons keep the requests after that, 0 to 3600. Weights stay."""
    heartbeat_timeout_s: float | None = None
    """None: the lease is renewed as long as the group is open and the thread that attached it
    lives. Otherwise the application must also call `WorkerGroup.lease.heartbeat` within this time;
    while it has not, daemons accept another driver."""

    def __post_init__(self) -> None:
        """Raise ClientConfigError if a time is out of bounds."""
        heartbeat_s = 0.0 if self.heartbeat_timeout_s is None else self.heartbeat_timeout_s
        for field, value, low, high in (
            ("ttl_s", self.ttl_s, MIN_LEASE_TTL_MS / 1000, MAX_LEASE_TTL_MS / 1000),
            ("orphan_kv_ttl_s", self.orphan_kv_ttl_s, 0.0, MAX_ORPHAN_KV_TTL_MS / 1000),
            ("heartbeat_timeout_s", heartbeat_s, 0.0, float("inf")),
        ):
            if not low <= value <= high:
                fix = f"use {low:g} to {high:g} seconds"
                raise config_error(field, value, "the time is out of bounds", fix)


def holder_name() -> str:
    """Return HOST:PID of this process, the name that other drivers see."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}"


class _Confirmed(NamedTuple):
    """Time at which the last renewal that a rank has answered was sent, by two clocks."""

    monotonic: float
    boottime: float
    """Counts the time in which this host was suspended; daemons on other hosts ran."""


def _now() -> _Confirmed:
    return _Confirmed(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME))


class LeaseKeeper:
    """Renews one epoch's lease on all daemons of a group, from `start` to `stop`, on its own thread
    and sockets.

    It renews only while the application is alive: the group is open and referenced, the thread
    that started the keeper lives, and a heartbeat came in time, if one is required. Otherwise it
    lets daemons accept another driver at once.
    """

    def __init__(
        self, context: Context, driver_id: bytes, terms: LeaseTerms, group: object
    ) -> None:
        """group: the keeper stops when it is collected without having been closed."""
        self.lost: WorkerError | LeaseNotRenewed | None = None
        """Reason for which the lease is lost; written by the keeper's thread, once."""
        self._context = context
        self._driver_id = driver_id
        self._terms = terms
        self._group = weakref.ref(group)
        self.owner = threading.current_thread()
        """It renews only while this thread lives."""
        self._epoch = 0
        self._attached = False
        self._last_heartbeat = time.monotonic()
        self._confirmed: dict[int, _Confirmed] = {}
        """By rank. Written by the keeper's thread alone, once it runs."""
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def start(
        self,
        epoch: int,
        daemons: Sequence[tuple[int, Endpoint]],
        owner: threading.Thread | None = None,
    ) -> None:
        """Begin to renew the lease of `epoch` on these daemons, given with their ranks, which are
        about to grant it. Until `confirm` their refusals are ignored. owner: the application's
        thread; None: the calling one.

        Raises:
            OutOfDescriptors: there is none left for its sockets.
            OutOfThreads: its thread cannot be started. Either way nothing is left open.
        """
        self.stop()
        self.lost = None
        self._epoch = epoch
        self._attached = False
        self.owner = threading.current_thread() if owner is None else owner
        self._confirmed = dict.fromkeys((rank for rank, _ in daemons), _now())
        self.heartbeat()
        self._ended, self._wake = threading.Event(), threading.Event()
        # Opened here, so that a failure is raised to the caller; only the thread uses them.
        channels = self._open_channels(daemons)
        thread = threading.Thread(
            target=self._run, args=(self._ended, self._wake, channels), name="lease", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            _close(channels)
            raise OutOfThreads from error
        self._thread = thread

    def _open_channels(self, daemons: Sequence[tuple[int, Endpoint]]) -> list[ControlChannel]:
        with contextlib.ExitStack() as opened:
            channels = []
            for rank, endpoint in daemons:
                channels.append(ControlChannel(self._context, endpoint, rank, DRIVER_OPERATIONS))
                opened.callback(channels[-1].close)
            opened.pop_all()
        return channels

    def confirm(self) -> None:
        """Let refusals end the lease from now on: all daemons have granted it."""
        self._attached = True

    def heartbeat(self) -> None:
        """Record that the application is alive."""
        self._last_heartbeat = time.monotonic()

    def check(self) -> None:
        """Raise the error that ended the lease, if there is one."""
        if self.lost is not None:
            raise self.lost

    def is_sure(self, rank: int, cut_at: float | None) -> bool:
        """Return True if no other driver can have this rank yet: our lease cannot have expired, and
        a renewal was answered that was sent after `cut_at` (of time.monotonic), when our connection
        ended for the last time. Always True while no lease is kept."""
        if self._thread is None or (confirmed := self._confirmed.get(rank)) is None:
            return True
        is_current = _now().boottime < confirmed.boottime + self._terms.ttl_s
        return is_current and (cut_at is None or confirmed.monotonic > cut_at)

    def renew_now(self) -> None:
        """Send a renewal soon."""
        self._wake.set()

    def stop(self) -> None:
        """Stop renewing. May be repeated."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def drop(self) -> None:
        """Stop renewing and forget how the lease ended: no remaining daemon has granted it."""
        self.stop()
        self.lost = None

    def _run(
        self, ended: threading.Event, wake: threading.Event, channels: Sequence[ControlChannel]
    ) -> None:
        try:
            self._renew_until(ended, wake, channels)
        except Exception as error:
            self.lost = LeaseNotRenewed(error)
            self.lost.__cause__ = error
        finally:
            _close(channels)

    def _renew_until(
        self, ended: threading.Event, wake: threading.Event, channels: Sequence[ControlChannel]
    ) -> None:
        """Renew at even intervals, even if a daemon takes long to answer, and when woken."""
        interval_s = min(RENEWAL_S, self._terms.ttl_s / RENEWALS_PER_TTL)
        due = time.monotonic() + interval_s
        while not ended.is_set() and self.lost is None:
            is_left = self._group() is None or not self.owner.is_alive()
            if is_left or wake.is_set() or time.monotonic() >= due:
                wake.clear()
                due = time.monotonic() + interval_s
                is_claimed = self._renew(channels, ended, due, yields=is_left or not self._beats)
                if is_left:
                    return
                if is_claimed:
                    due = time.monotonic() + CLAIMED_RETRY_S
            wake.wait(min(OWNER_CHECK_S, max(0.0, due - time.monotonic())))

    @property
    def _beats(self) -> bool:
        timeout_s = self._terms.heartbeat_timeout_s
        return timeout_s is None or time.monotonic() - self._last_heartbeat <= timeout_s

    def _renew(
        self,
        channels: Sequence[ControlChannel],
        ended: threading.Event,
        deadline: float,
        *,
        yields: bool,
    ) -> bool:
        """Send a renewal to all daemons, then read their replies. One that does not answer is asked
        again at the next interval. Return True if another driver claims one of them."""
        request = partial(RenewLease, driver_id=self._driver_id, epoch=self._epoch, yields=yields)
        pending: list[tuple[PendingCall[RenewLeaseReply], _Confirmed]] = []
        for channel in channels:
            with contextlib.suppress(*_ASK_AGAIN):
                sent = _now()
                pending.append((channel.send(request, 0.0), sent))
        is_claimed = False
        for call, sent in pending:
            try:
                reply = self._await(call, ended, deadline)
            except WorkerError as error:
                if error.is_reported and self._attached and not ended.is_set():
                    self.lost = error
                    break
                continue
            except _ASK_AGAIN:
                continue
            if reply is not None and reply.is_claimed:
                is_claimed = True
            elif reply is not None and not yields:
                self._confirmed[call.channel.rank] = sent
        return is_claimed

    def _await(
        self, call: "PendingCall[RenewLeaseReply]", ended: threading.Event, deadline: float
    ) -> RenewLeaseReply | None:
        while time.monotonic() < deadline and not ended.is_set():
            reply = call.poll(min(deadline, time.monotonic() + STOP_CHECK_S))
            if reply is not None:
                return reply
        return None


def _close(channels: Sequence[ControlChannel]) -> None:
    for channel in channels:
        channel.close()


class Patience:
    """Wait of a driver for another one's lease to end: the time left, and the signs that the holder
    lives."""

    def __init__(self, wait_s: float) -> None:
        self._until = time.monotonic() + wait_s
        self._remaining: dict[str, float] = {}
        """Remaining time of the lease at each rank's endpoint at the last check."""
        self._renewals = 0

    def wait(self, refusal: LeaseHeldError) -> None:
        """Wait a moment before the next attempt.

        Raises:
            LeaseHeldError: the refusal, if the holder has renewed its lease, another driver holds
                it now, or the time is over.
        """
        if not refusal.is_claim:
            before = self._remaining.get(refusal.endpoint, refusal.remaining_s)
            self._remaining[refusal.endpoint] = refusal.remaining_s
            self._renewals += refusal.remaining_s > before + RENEWAL_SLACK_S
        if self._renewals >= RENEWALS_OF_THE_LIVING or time.monotonic() >= self._until:
            raise refusal
        # At random: two drivers that each claim what the other one lacks must not go on so.
        pause_s = POLL_S * random.uniform(0.5, 1.5)
        time.sleep(min(pause_s, refusal.remaining_s + EXPIRY_SLACK_S))
