"""Attach in two phases, detach, and the lease between them. Owns the prepared and the taken epoch,
and changes the lease. Runs on the main thread's event loop; the step thread, which takes an epoch,
receives commands and is awaited with a limit."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Final, TypeAlias

from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema.codec import ControlReplyMessage
from rpc_schema.errors import FencedError, IncompatibleError, NotAttachedError, StateError
from rpc_schema.health import Hello, HelloReply
from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from worker_daemon.server.auth.access import Sender
from worker_daemon.server.health.guard import Guard
from worker_daemon.server.progress import Progress
from worker_daemon.server.session.contact import HolderContact
from worker_daemon.server.session.draining import Draining
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.session.lease import DriverIdentity, Lease, lease_terms
from worker_daemon.server.session.status import StatusReport
from worker_daemon.server.step_senders import EpochOwner
from worker_daemon.server.step_thread import (
    UID_BYTES,
    Attach,
    AttachSnapshot,
    Command,
    DropRequests,
    EndEpoch,
    Orphan,
)
from worker_daemon.worker.uploads import Uploads

BUSY_GRACE_S: Final = 0.2
"""Time that attach waits for a running step before it aborts the link."""
ATTACH_SLACK_S: Final = 3.0
"""Time that attach waits beyond the step deadline: a wait on gloo ends one second after that."""
MAX_GREETED: Final = 64
"""Drivers of one key whose version is remembered; a driver says Hello just before it attaches."""
_LINK_PACKAGES: Final = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")

_Claim: TypeAlias = tuple[int, DriverIdentity]
"""An epoch, and the driver that it was prepared for."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AttachHandler:
    """Attaches drivers. An epoch is prepared for one driver, recorded on disk, taken by the step
    thread, and held by the lease. Epochs increase; of two drivers, the one with the higher epoch
    has the daemon."""

    _epochs: EpochFile
    _lease: Lease
    _contact: HolderContact
    _draining: Draining
    _progress: Progress
    _guard: Guard
    _report: StatusReport
    _uploads: Uploads
    """Dropped with the lease."""
    _post: Callable[[Command], None]
    """Sends to the step thread."""
    _link_software: str = field(default_factory=lambda: link_software(), init=False)
    _versions: dict[str, OrderedDict[bytes, int]] = field(default_factory=dict, init=False)
    """Versions by owner and driver id. Only drivers are remembered, so there are at most as many
    owners as authorized driver keys."""
    _prepared: _Claim = field(default=(0, DriverIdentity("", b"")), init=False)
    _taken: tuple[_Claim, asyncio.Task[AttachSnapshot]] | None = field(default=None, init=False)
    """The driver that took the daemon over last, or is about to."""

    def hello(self, message: Hello, sender: Sender) -> ControlReplyMessage:
        """Answer any version, and remember it if the sender may drive and has a valid driver id."""
        if sender.drives and len(message.driver_id) == UID_BYTES:
            versions = self._versions.setdefault(sender.owner, OrderedDict())
            versions[message.driver_id] = message.protocol_version
            versions.move_to_end(message.driver_id)
            if len(versions) > MAX_GREETED:
                versions.popitem(last=False)
        return HelloReply(
            call=message.call,
            protocol_version=PROTOCOL_VERSION,
            worker_uid=self._report.worker_uid,
            software=f"worker-daemon {SOFTWARE_VERSION}",
            link_software=self._link_software,
        )

    def prepare(self, message: lc.PrepareAttach, sender: Sender) -> ControlReplyMessage:
        """Grant an epoch above all earlier ones; it is on disk when this returns. Raises
        IncompatibleError, and the errors of the draining, the lease and the epoch file."""
        driver = DriverIdentity(sender.owner, message.driver_id)
        self._draining.check_takes_drivers()
        self._need_same_version(driver)
        self._lease.check_free_for(driver, force=message.force)
        last = self._epochs.last
        if message.epoch <= last:
            return lc.PrepareAttachReply(call=message.call, granted=False, last_epoch=last)
        self._epochs.record(message.epoch)
        self._prepared = (message.epoch, driver)
        self._lease.claim(driver, message.epoch, force=message.force)
        return lc.PrepareAttachReply(call=message.call, granted=True, last_epoch=message.epoch)

    async def commit(self, message: lc.CommitAttach, sender: Sender) -> ControlReplyMessage:
        """Take the prepared epoch. An attempt continues even if its driver stops waiting.

        Raises:
            FencedError: another driver has prepared a higher epoch.
            LeaseHeldError: the driver prepared it too long ago, and another has the lease now.
            NotAttachedError: the epoch was never prepared by this driver.
            ConfigError: the lease's terms are out of bounds.
            StateError: the step thread was busy for too long.
        """
        snapshot = await asyncio.shield(self._taking(message, sender))
        return lc.CommitAttachReply(
            call=message.call,
            previous_epoch=snapshot.epoch,
            previous_seq=snapshot.seq,
            previous_clean=snapshot.clean,
            status=self._report.status(),
        )

    def check_owner(self, epoch: int, owner: str) -> None:
        """Raise ForbiddenError if `epoch` was granted to another key or user."""
        self._lease.check_owner(owner, epoch)

    def detach(self, message: lc.Detach) -> ControlReplyMessage:
        """Release the lease, even if it has expired, or give up a prepared epoch. Idempotent: a
        late detach does no harm."""
        if self._lease.release(message.epoch):
            logger.info("epoch %d: its driver has detached", message.epoch)
            self._contact.forget()
            self._keep_uploads_in_use()
            self._post(EndEpoch(message.epoch))
        elif not self._lease.give_up(message.epoch) and not self._lease.was_released(message.epoch):
            self.need_attached(message.epoch)
        return lc.Acknowledged(call=message.call)

    def renew_lease(self, message: ls.RenewLease, sender: Sender) -> ControlReplyMessage:
        """Renew the lease for its full time from now on, or make it claimable. Raises as
        Lease.renew does."""
        driver = DriverIdentity(sender.owner, message.driver_id)
        is_renewed = self._lease.renew(driver, message.epoch, yields=message.yields)
        self._contact.renewed()
        remaining_ms = self._lease.status().remaining_ms
        return ls.RenewLeaseReply(
            call=message.call, remaining_ms=remaining_ms, is_claimed=not is_renewed
        )

    def watch_lease(self) -> None:
        """Tell the step thread of an expired lease, and of requests that no driver adopted in
        time."""
        expired = self._lease.take_expiry()
        if expired:
            logger.warning("the lease of epoch %d has ended: waiting for a driver", expired)
            self._contact.forget()
            self._post(Orphan(expired))  # drops uploads once no step can start to use them
        unclaimed = self._lease.take_kv_end()
        if unclaimed:
            self._post(DropRequests(unclaimed))

    def need_attached(self, epoch: int) -> None:
        """Raise FencedError, LeaseExpiredError or NotAttachedError unless the epoch is the attached
        driver's."""
        current = self._progress.epoch
        if epoch > current:
            raise NotAttachedError(f"epoch {epoch} is not attached; {current} is", fix="attach")
        self._lease.need_held(epoch)

    def close(self) -> None:
        """Stop waiting for the step thread, and watching the holder."""
        self._contact.forget()
        if self._taken is not None:
            self._taken[1].cancel()

    def _keep_uploads_in_use(self) -> None:
        """Drop a former driver's uploads, except those of requests that may be adopted."""
        self._uploads.keep_only(self._progress.snapshot.description.uploads_in_use())

    def _need_same_version(self, driver: DriverIdentity) -> None:
        greeted = self._versions.get(driver.owner)
        version = None if greeted is None else greeted.get(driver.driver_id)
        if version == PROTOCOL_VERSION:
            return
        its = "has not said Hello" if version is None else f"has protocol version {version}"
        raise IncompatibleError(
            f"the driver {its}; the daemon has protocol version {PROTOCOL_VERSION}",
            fix="say Hello first" if version is None else "use releases of the same version",
        )

    def _taking(self, message: lc.CommitAttach, sender: Sender) -> "asyncio.Task[AttachSnapshot]":
        """Start to take the prepared epoch; a repeated request of the same driver joins the running
        attempt."""
        asked = (message.epoch, DriverIdentity(sender.owner, message.driver_id))
        if message.epoch < self._prepared[0]:
            problem = f"epoch {message.epoch} is fenced by {self._prepared[0]}"
            raise FencedError(problem, fix="prepare again")
        if asked != self._prepared:
            raise NotAttachedError(f"epoch {message.epoch} was not prepared", fix="prepare first")
        if self._taken is None or self._taken[0] != asked:
            terms = lease_terms(message.lease_ttl_ms, message.orphan_kv_ttl_ms, message.holder_name)
            self._lease.check_claim(asked[1], message.epoch)
            taking = self._take_epoch(message, asked[1], sender)
            # At once: a driver that waits for a hanging step is watched, and renews the lease.
            self._lease.grant(asked[1], message.epoch, terms)
            self._contact.watch(message.epoch, message.results_route, sender.pid)
            self._taken = asked, asyncio.ensure_future(taking)
        return self._taken[1]

    async def _take_epoch(
        self, message: lc.CommitAttach, driver: DriverIdentity, sender: Sender
    ) -> AttachSnapshot:
        """Make the step thread take the prepared epoch; abort the link if a step hangs on its
        peers."""
        epoch, owner = message.epoch, EpochOwner(driver.owner, message.results_route)
        if not message.keep_requests:
            self._uploads.drop_all()
        self._guard.hangs.forgive()
        attached: Future[AttachSnapshot] = Future()  # set on the completion thread
        self._post(
            Attach(epoch, owner, attached.set_result, message.keep_requests, self._lease.holder)
        )
        taken = asyncio.wrap_future(attached)
        was_freed = False
        done, _ = await asyncio.wait((taken,), timeout=BUSY_GRACE_S)
        if not done:
            was_freed = self._free_from_peers(f"epoch {epoch} attaches")
            self._progress.is_awaited = True
            await asyncio.wait((taken,), timeout=self._progress.step_deadline_s + ATTACH_SLACK_S)
            self._progress.is_awaited = False
        if taken.done():
            snapshot = taken.result()
            self._keep_uploads_in_use()
            self._log_attached(epoch, sender)
            return replace(snapshot, clean=snapshot.clean and not was_freed)
        self._lease.release(epoch)
        self._contact.forget()
        self._post(EndEpoch(epoch))  # it may still take the epoch
        stamp = self._progress.stamp
        raise StateError(
            f"the step thread has been in {stamp.phase} for {stamp.age_ms(time.monotonic())} ms",
            fix="attach again later, or restart this daemon",
        )

    def _log_attached(self, epoch: int, sender: Sender) -> None:
        loaded = self._progress.snapshot
        config = loaded.description.config
        model = "no model" if config is None else f"model {config.model.model}"
        logger.info(
            *("epoch %d: %s has attached (%s) and finds %s", epoch, self._lease.holder),
            *(sender.shown, f"{model}, {loaded.state.load}"),
        )

    def _free_from_peers(self, cause: str) -> bool:
        """Abort the link if the step or a result may be waiting for other ranks; return True if so.
        Otherwise only this daemon's threads are late, and nothing is interrupted."""
        for stamp in (self._progress.stamp, self._progress.result):
            if stamp.on_link:
                self._guard.request_abort(f"{cause} while {stamp.phase} is waited for")
                return True
        return False


def link_software() -> str:
    """Return HelloReply.link_software: the packages that must have the same versions on all ranks
    of a link. Imports none."""
    found = []
    for package in _LINK_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)
