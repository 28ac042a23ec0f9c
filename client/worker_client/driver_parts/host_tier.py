"""A host tier that survives its driver, and maybe its daemons: gives the scheduler what all ranks
have in host memory, at first and after a rank was replaced."""

import logging
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from rpc_schema.errors import WorkerDaemonError
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.group.prefixes import GroupPrefixes
from worker_client.steps.cached_blocks import CachedBlocks

_LOG = logging.getLogger(__name__)


@runtime_checkable
class TieredScheduler(Protocol):
    """A scheduler that keeps evicted blocks in the ranks' host memory: its steps have HostMoves
    among their extensions."""

    @property
    def has_host_tier(self) -> bool:
        """True if it does with these limits."""

    @property
    def prefix_tag(self) -> bytes:
        """See RestoringScheduler."""

    def restore_host_tier(self, slots: CachedBlocks) -> int:
        """Take slots with known contents, by their numbers as block ids, before the first step or
        after forget_host_tier(); return how many were taken."""

    def forget_host_tier(self) -> None:
        """Drop all contents: a rank was replaced, and the next step fails (step_failed)."""


class RestoredTierPart(DriverPart):
    """Begins a driver with the host memory of earlier ones, and goes on with what a replaced rank
    has taken over. Slots that only some ranks have filled are left out."""

    def __init__(
        self, context: DriverContext, scheduler: TieredScheduler, *, restores: bool
    ) -> None:
        """restores: False begins with empty slots."""
        self._scheduler = scheduler
        prefixes: GroupPrefixes | None = getattr(context.group, "prefixes", None)
        self._prefixes = prefixes if restores else None
        self._restore()

    def group_replaced(self) -> None:
        self._scheduler.forget_host_tier()
        self._restore()

    def _restore(self) -> None:
        scheduler, prefixes = self._scheduler, self._prefixes
        if prefixes is None:
            return
        try:
            slots = prefixes.get(scheduler.prefix_tag, in_host_tier=True)
        except WorkerDaemonError as error:
            _LOG.warning("what the ranks have in host memory is not used: %s", error)
            return
        num_restored = scheduler.restore_host_tier(slots)
        if num_restored:
            _LOG.info("restored %d blocks in host memory", num_restored)


def host_tier_parts(context: DriverContext, *, restores: bool) -> Iterator[RestoredTierPart]:
    """Yield the part of a driver whose scheduler has a host tier."""
    scheduler: object = context.scheduler
    if isinstance(scheduler, TieredScheduler) and scheduler.has_host_tier:
        yield RestoredTierPart(context, scheduler, restores=restores)
