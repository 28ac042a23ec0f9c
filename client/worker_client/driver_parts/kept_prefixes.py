"""A prefix cache that survives its driver: notes the scheduler's cached blocks on the daemons, and
restores those that an earlier driver has noted."""

import logging
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from rpc_schema.errors import (
    WorkerDaemonError,
)
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.group.prefixes import GroupPrefixes
from worker_client.scheduler.prefix_cache import CachedChanges
from worker_client.steps.cached_blocks import CachedBlocks

NOTE_INTERVAL: Final = 16
"""Number of steps between two notes: more than are ever in flight."""
NEVER: Final = 2**63
"""Number of steps that no driver sends."""

_LOG = logging.getLogger(__name__)


@runtime_checkable
class RestoringScheduler(Protocol):
    """A scheduler whose prefix cache can be restored after its process has ended."""

    @property
    def prefix_tag(self) -> bytes:
        """The name of its hashes, at most 64 bytes: schedulers of one tag make equal hashes of
        equal contents."""

    def restore_prefixes(self, blocks: CachedBlocks) -> int:
        """Take blocks with known contents into the prefix cache, before the first step; return how
        many were taken. Blocks that are in use stay out."""

    def take_cached_changes(self) -> CachedChanges:
        """Return what has changed in the prefix cache since the last call. Blocks that were cached
        and given to another request since may be left out."""


class _Waiting(NamedTuple):
    """Changes that are noted once a step has succeeded."""

    changes: CachedChanges
    after: Any
    """Future of the last step that was sent when they were collected."""
    num_sent: int
    """Number of steps sent by then."""


class KeptPrefixes:
    """Owned by a driver; for one group and one scheduler."""

    def __init__(self, group: object, scheduler: object) -> None:
        self._parts: tuple[GroupPrefixes, RestoringScheduler] | None = None
        prefixes: GroupPrefixes | None = getattr(group, "prefixes", None)
        if prefixes is not None and isinstance(scheduler, RestoringScheduler):
            self._parts = prefixes, scheduler
        self._waiting: _Waiting | None = None
        self.due = NEVER if self._parts is None else NOTE_INTERVAL
        """Number of sent steps at which proceed() is to be called."""

    def restore(self) -> None:
        """Give the scheduler the blocks that earlier drivers have noted. If the group cannot tell,
        it begins without."""
        if self._parts is None:
            return
        prefixes, scheduler = self._parts
        try:
            num_restored = scheduler.restore_prefixes(prefixes.get(scheduler.prefix_tag))
        except WorkerDaemonError as error:
            _LOG.warning("the prefix cache of earlier drivers is not restored: %s", error)
            return
        if num_restored:
            _LOG.info("restored %d cached blocks of earlier drivers", num_restored)

    def proceed(self, num_sent: int, num_done: int, newest: object) -> None:
        """Note the blocks that were cached by an earlier call, if the steps sent by then have
        succeeded, and collect the next ones. newest: future of the last step sent."""
        if self._parts is None:
            return
        self.due = num_sent + NOTE_INTERVAL
        prefixes, scheduler = self._parts
        self._send(prefixes, scheduler.prefix_tag, num_done)
        if self._waiting is None:
            changes = scheduler.take_cached_changes()
            if changes.cached.block_ids.size or changes.distrusted:
                self._waiting = _Waiting(changes, newest, num_sent)
            self._send(prefixes, scheduler.prefix_tag, num_done)

    def forget(self) -> None:
        """Forget what is not noted yet: steps have failed."""
        self._waiting = None

    def _send(self, prefixes: GroupPrefixes, tag: bytes, num_done: int) -> None:
        waiting = self._waiting
        if waiting is None or waiting.num_sent > num_done:
            return
        changes = waiting.changes
        if prefixes.note(tag, changes.cached, waiting.after, distrusted=changes.distrusted):
            self._waiting = None


class KeptPrefixesPart(DriverPart):
    """Begins a driver with the cached prefixes of earlier ones, and notes its own."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._prefixes = KeptPrefixes(context.group, context.scheduler)
        self._prefixes.restore()

    def settled(self, flight: StepInFlight) -> None:
        """Note what is cached, now and then and once all is done."""
        steps = self._context.steps
        if steps.num_sent < self._prefixes.due and steps.in_flight:
            return
        if steps.unsent is not None or steps.has_failed:
            return  # the scheduler counts the unsent step as sent, and a failed one too
        has_more = self._context.scheduler.has_unfinished_requests()
        if steps.num_sent < self._prefixes.due and has_more:
            return
        newest = (steps.in_flight[-1] if steps.in_flight else flight).future
        self._prefixes.proceed(steps.num_sent, steps.num_done, newest)

    def steps_failed(self) -> None:
        self._prefixes.forget()
