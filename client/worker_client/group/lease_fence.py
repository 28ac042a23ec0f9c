"""Fences the results of steps by the lease, as epochs fence the steps."""

import contextlib
import time
from collections.abc import Callable

from rpc_schema.errors import NotAttachedError
from worker_client.errors import WorkerDied
from worker_client.group.group_daemons import GroupDaemons
from worker_client.wire.lease import LeaseKeeper

LEASE_CHECK_S = 0.05
"""Interval at which the group checks that the lease is its own before it takes a result: less than
daemons wait for a driver whose connection has ended."""
LEASE_POLL_S = 0.005


class LeaseFence:
    """Owned by the group's channel, and belongs to its thread. The keeper, which renews the lease,
    has a thread of its own."""

    def __init__(
        self, daemons: GroupDaemons, lease: LeaseKeeper, listen: Callable[[], None]
    ) -> None:
        """listen: called while the lease is waited for; it passes events to the watch."""
        self._daemons = daemons
        self._lease = lease
        self._listen = listen
        self._sure_at = 0.0

    def check(self) -> None:
        """Raise the error that ended the lease, or WorkerDied if the daemon that refuses it is the
        successor of one that had granted it."""
        if isinstance(self._lease.lost, NotAttachedError):
            self._daemons.find_successors()
            self._daemons.check_lives()
        self._lease.check()

    def wait(self) -> None:
        """Wait until no other driver can have the daemons: it would deliver this result too. A dead
        rank is nobody's.

        Raises:
            WorkerError, LeaseNotRenewed: the lease is lost.
            AuthenticationError: a daemon refused us.
        """
        if time.monotonic() < self._sure_at + LEASE_CHECK_S:
            return
        while not self._is_sure():
            self._listen()
            self.check()
            self._lease.renew_now()
            time.sleep(LEASE_POLL_S)
        self._sure_at = time.monotonic()

    def _is_sure(self) -> bool:
        watch = self._daemons.watch
        self._daemons.results.read_connection_events()
        with contextlib.suppress(WorkerDied):
            watch.look()
        return all(
            watch.is_dead(client.rank)
            or self._lease.is_sure(client.rank, watch.cut_at(client.rank))
            for client in self._daemons.present
        )
