"""Watches the holder of the lease: notices that its process has ended, and that its results
connection has. Runs on the main thread's event loop.

A process on this host that connects over ipc is known to the kernel: its descriptor (pidfd) says
that it has ended, even if a child of it holds its connections open. A connection proves less: the
network may have cut it, and the holder connects again by itself, even if it cannot run Python. So
the lease whose connection has ended is only claimable (lease.py).

libzmq reports the end of some connection of the results socket; whether it is the holder's shows an
empty message to the holder's routing id, which libzmq refuses if no connection has that id.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from worker_daemon.server.session.lease import Lease

GRACE_S: Final = 0.15
"""Time in which the holder may connect again before its lease is claimable. Only time in which this
daemon ran counts. A driver tries for the first time after 10 to 20 ms."""
SETTLE_S: Final = 0.004
"""Time in which a routing id is free after the end of its connection (2.5 ms measured)."""
SETTLED_S: Final = 0.02
"""The same on a busy host."""
POLL_S: Final = 0.01
IDLE_POLL_S: Final = 0.05
"""Interval while the lease is claimable."""
STOPPED_S: Final = 0.5
"""Time between two looks after which the grace begins anew: the holder may have been cut off and
come back while the daemon stood. Shorter delays are a slow host's, where each look may be late."""
MAX_PROBES: Final = 16
"""Empty messages between two renewals: a holder that does not read them must still have room for
results, however many other connections end."""

logger = logging.getLogger(__name__)


class HolderContact:
    """Watches one holder at a time."""

    def __init__(
        self, lease: Lease, reaches: Callable[[bytes], bool], changed: Callable[[], None]
    ) -> None:
        """reaches: sends an empty message to the holder's routing id; returns False if no
        connection has that id. changed: called when the lease has ended or become claimable."""
        self._lease = lease
        self._reaches = reaches
        self._changed = changed
        self._epoch = 0
        self._route = b""
        self._pid_fd = -1
        self._num_probes = 0
        self._looking: asyncio.Task[None] | None = None
        self._must_look = False

    def watch(self, epoch: int, route: bytes, pid: int) -> None:
        """Watch the driver of `epoch` from now on. pid: its process, from the kernel; 0 if it is
        unknown, or of another namespace."""
        self.forget()
        self._epoch, self._route, self._num_probes = epoch, route, 0
        if not pid:
            return
        try:
            self._pid_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._process_ended, epoch)
        except OSError as error:  # an old kernel, a strict sandbox, no descriptors
            logger.info("the end of the driver's process cannot be watched: %s", error)
        else:
            asyncio.get_running_loop().add_reader(self._pid_fd, self._process_ended, epoch)

    def forget(self) -> None:
        """Watch nobody: the lease has ended."""
        self._epoch, self._route = 0, b""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if self._pid_fd >= 0:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                asyncio.get_running_loop().remove_reader(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = -1

    def renewed(self) -> None:
        """Record that the holder has renewed its lease: it reads what it is sent."""
        self._num_probes = 0

    def connection_ended(self) -> None:
        """Look whether the holder's connection was the one that has ended."""
        if not self._epoch:
            return
        self._must_look = True
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look(self._epoch))
            self._looking.add_done_callback(self._looked)

    def _looked(self, task: "asyncio.Task[None]") -> None:
        if self._looking is task:
            self._looking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the holder's connection cannot be watched", exc_info=error)

    def _process_ended(self, epoch: int) -> None:
        if epoch == self._epoch:
            logger.warning("the process of %s has ended", self._lease.holder)
            self._lease.holder_ended(epoch)
            self._changed()

    async def _look(self, epoch: int) -> None:
        """Wait until the holder surely has a connection, and report how it was meanwhile."""
        while self._must_look:
            self._must_look = False
            for wait_s in (SETTLE_S, SETTLED_S):
                await asyncio.sleep(wait_s)
                if not self._is_connected():
                    await self._await_return(epoch)
                    break

    async def _await_return(self, epoch: int) -> None:
        ran_s, lost = 0.0, False
        while True:
            if ran_s >= GRACE_S and self._lease.contact_lost(epoch):
                logger.warning(
                    "%s has no connection: another driver may attach", self._lease.holder
                )
                lost = True
                self._changed()
            began = time.monotonic()
            interval_s = IDLE_POLL_S if lost else POLL_S
            await asyncio.sleep(interval_s)
            ran_s = 0.0 if time.monotonic() - began > STOPPED_S else ran_s + interval_s
            if self._is_connected() and (not lost or self._lease.contact_returned(epoch)):
                break
        if lost:
            logger.info("%s is connected again", self._lease.holder)

    def _is_connected(self) -> bool:
        """Return True also if the holder must not be sent any more empty messages."""
        if self._num_probes >= MAX_PROBES:
            return True
        is_reached = self._reaches(self._route)
        self._num_probes += is_reached
        return is_reached
