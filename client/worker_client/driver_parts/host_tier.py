"""A host tier that survives its driver: gives the scheduler what earlier drivers have left in the
ranks' host memory, and tells it when that is lost."""

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
        """Take slots with known contents, by their numbers as block ids, before the first step;
        return how many were taken."""

    def forget_host_tier(self) -> None:
        """Drop all contents: a rank has lost them."""


class RestoredTierPart(DriverPart):
    """Begins a driver with the host memory of earlier ones. Slots that only some ranks have filled
    are left out, so a rank that was started since leaves none."""

    def __init__(
        self, context: DriverContext, scheduler: TieredScheduler, *, restores: bool
    ) -> None:
        """restores: False begins with empty slots."""
        self._scheduler = scheduler
        prefixes: GroupPrefixes | None = getattr(context.group, "prefixes", None)
        if restores and prefixes is not None:
            self._restore(prefixes)

    def group_replaced(self) -> None:
        self._scheduler.forget_host_tier()

    def _restore(self, prefixes: GroupPrefixes) -> None:
        scheduler = self._scheduler
        try:
            slots = prefixes.get(scheduler.prefix_tag, in_host_tier=True)
        except WorkerDaemonError as error:
            _LOG.warning("the host memory of earlier drivers is not used: %s", error)
            return
        num_restored = scheduler.restore_host_tier(slots)
        if num_restored:
            _LOG.info("restored %d blocks of earlier drivers in host memory", num_restored)


def host_tier_parts(context: DriverContext, *, restores: bool) -> Iterator[RestoredTierPart]:
    """Yield the part of a driver whose scheduler has a host tier."""
    scheduler: object = context.scheduler
    if isinstance(scheduler, TieredScheduler) and scheduler.has_host_tier:
        yield RestoredTierPart(context, scheduler, restores=restores)
