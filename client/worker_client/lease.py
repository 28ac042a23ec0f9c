"""The driver's side of the lease: the thread that renews it on every daemon of a group while the
application is alive, and the patience of a driver that finds another one's. Knows nothing of
steps."""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from rpc_schema.errors import WireError
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
    ClientConfigError,
    DeadlineExceeded,
    LeaseHeldError,
    LeaseNotRenewed,
    OutOfThreads,
    RemoteError,
    WorkerDied,
)
from worker_client.transport import Context, ControlChannel, Endpoint, PendingCall

RENEWALS_PER_TTL = 4
"""A driver may stand still for the other three quarters, less the way of one renewal."""
STOP_CHECK_S = 0.05
"""How long a wait for answers goes on before it looks whether it is to end."""
POLL_S = 0.1
"""So often a waiting driver looks whether the holder has renewed its lease: more often than the
shortest lease is renewed, or each look would find as much left as the one before."""
EXPIRY_SLACK_S = 0.01
"""Waited beyond the announced expiry, which is rounded to milliseconds."""
RENEWAL_SLACK_S = 0.02
"""What is left of a lease grows by a renewal alone: by more than this, or it was rounded. That it
shrinks less than time passes tells nothing: a daemon does not count the time in which it was kept
from looking at the lease."""
RENEWALS_OF_THE_LIVING = 2
"""The first may have been under way when its sender died."""


_ASK_AGAIN = (DeadlineExceeded, WireError, AuthenticationError, WorkerDied)
"""What a renewal may fail of while the lease lasts: the group's thread judges who is dead."""


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


class LeaseKeeper:
    """Renews one epoch's lease on all daemons of a group, from `start` to `stop`, on a thread of
    its own with sockets of its own.

    It does so only while the application's loop is alive: the group is open and referred to, the
    thread that started the keeper lives, and a heartbeat came lately, where one is asked for.
    """

    def __init__(
        self,
        context: Context,
        driver_id: bytes,
        terms: LeaseTerms,
        group: object,
    ) -> None:
        """group: whose end is the keeper's too, should nobody close it."""
        self.lost: RemoteError | LeaseNotRenewed | None = None
        """Why the lease is not this driver's any more; written by the keeper's thread, once."""
        self._context = context
        self._driver_id = driver_id
        self._terms = terms
        self._group = weakref.ref(group)
        self._owner = threading.current_thread()
        self._epoch = 0
        self._attached = False
        self._last_heartbeat = time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, epoch: int, daemons: Sequence[tuple[int, Endpoint]]) -> None:
        """Begin to renew the lease of `epoch`, which these daemons, each with its rank, are about
        to grant: until `confirm` their refusals mean nothing.

        Raises:
            OutOfDescriptors: there is none left for its sockets.
            OutOfThreads: its thread cannot be started. Either way nothing is left open.
        """
        self.stop()
        self.lost = None
        self._epoch = epoch
        self._attached = False
        self._owner = threading.current_thread()
        self.heartbeat()
        self._ended = threading.Event()
        # Opened here, so that the caller hears of a failure; the thread alone uses them.
        channels = self._open_channels(daemons)
        thread = threading.Thread(
            target=self._run, args=(self._ended, channels), name="lease", daemon=True
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
                channels.append(ControlChannel(self._context, endpoint, rank))
                opened.callback(channels[-1].close)
            opened.pop_all()
        return channels

    def confirm(self) -> None:
        """All daemons have granted it: whoever refuses a renewal from now on ends it."""
        self._attached = True

    def heartbeat(self) -> None:
        """The application is alive."""
        self._last_heartbeat = time.monotonic()

    def check(self) -> None:
        """Raise the error that ended the lease, if one did."""
        if self.lost is not None:
            raise self.lost

    def stop(self) -> None:
        """Renew no more. May be repeated."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def drop(self) -> None:
        """No daemon is left that has granted it: renew no more, and forget how it ended."""
        self.stop()
        self.lost = None

    def _run(self, ended: threading.Event, channels: Sequence[ControlChannel]) -> None:
        try:
            self._renew_until(ended, channels)
        except Exception as error:
            self.lost = LeaseNotRenewed(error)
            self.lost.__cause__ = error
        finally:
            _close(channels)

    def _renew_until(self, ended: threading.Event, channels: Sequence[ControlChannel]) -> None:
        """Renew at even intervals, however long a daemon takes to answer."""
        interval_s = self._terms.ttl_s / RENEWALS_PER_TTL
        due = time.monotonic() + interval_s
        while not ended.wait(max(0.0, due - time.monotonic())) and self._group() is not None:
            if not self._owner.is_alive():
                return
            due = time.monotonic() + interval_s
            if self._is_beating():
                self._renew(channels, ended, due)
            if self.lost is not None:
                return

    def _is_beating(self) -> bool:
        timeout_s = self._terms.heartbeat_timeout_s
        return timeout_s is None or time.monotonic() - self._last_heartbeat <= timeout_s

    def _renew(
        self, channels: Sequence[ControlChannel], ended: threading.Event, deadline: float
    ) -> None:
        """Ask all daemons, then hear them. One that does not answer is asked again next time."""
        request = partial(RenewLease, driver_id=self._driver_id, epoch=self._epoch)
        pending: list[PendingCall[RenewLeaseReply]] = []
        for channel in channels:
            with contextlib.suppress(*_ASK_AGAIN):
                pending.append(channel.send(request, 0.0))
        for call in pending:
            try:
                while time.monotonic() < deadline and not ended.is_set():
                    if call.poll(min(deadline, time.monotonic() + STOP_CHECK_S)) is not None:
                        break
            except _ASK_AGAIN:
                continue
            except RemoteError as error:
                if self._attached and not ended.is_set():
                    self.lost = error
                    return


def _close(channels: Sequence[ControlChannel]) -> None:
    for channel in channels:
        channel.close()


class Patience:
    """Of a driver that waits for another one's lease to expire: the time that it has, and whether
    the holder shows that it lives."""

    def __init__(self, wait_s: float) -> None:
        self._until = time.monotonic() + wait_s
        self._remaining: dict[int, float] = {}
        """What was left of each rank's lease when it was last asked for."""
        self._renewals = 0

    def wait(self, refusal: LeaseHeldError) -> None:
        """Wait a moment before the next attempt.

        Raises:
            LeaseHeldError: the refusal, where the holder has renewed its lease, another one has got
                it, or the time is too short to wait for its end.
        """
        before = self._remaining.get(refusal.rank, refusal.remaining_s)
        self._remaining[refusal.rank] = refusal.remaining_s
        self._renewals += refusal.remaining_s > before + RENEWAL_SLACK_S
        expiry = time.monotonic() + refusal.remaining_s
        if self._renewals >= RENEWALS_OF_THE_LIVING or expiry > self._until:
            raise refusal
        time.sleep(min(POLL_S, refusal.remaining_s + EXPIRY_SLACK_S))
