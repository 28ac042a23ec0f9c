"""Tells a scheduler which weights the group and its adapters have, so that it reuses no KV of
others."""

from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.group.loras import GroupAdapter, GroupLoras
from worker_client.group.running import RunningRequests
from worker_client.group.weights import GroupWeights
from worker_client.scheduler import (
    AdaptingScheduler,
    RecomputingScheduler,
    VersionedScheduler,
)


class WeightsPart(DriverPart):
    """Passes on each version of the weights, and of an adapter's. Of several drivers of a group,
    the newest one does."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._follow_adapters()
        scheduler = context.scheduler
        weights: GroupWeights | None = getattr(context.group, "weights", None)
        if weights is None:
            return
        weights.planned = lambda: context.steps.unsent
        weights.on_version = weights.on_recomputed = None
        if not isinstance(scheduler, VersionedScheduler):
            return
        weights.on_version = scheduler.use_weights
        if isinstance(scheduler, RecomputingScheduler):
            weights.on_recomputed = scheduler.share_recomputed
        if weights.version is not None:
            scheduler.use_weights(weights.version)

    def _follow_adapters(self) -> None:
        loras: GroupLoras | None = getattr(self._context.group, "loras", None)
        if loras is None:
            return
        loras.on_update, loras.updates_fault = None, ""
        if not isinstance(self._context.scheduler, AdaptingScheduler):
            loras.updates_fault = "the driver's scheduler has no use_adapter()"
            return
        loras.on_update = self._adapter_updated
        for adapter in loras.known.values():
            if adapter.weights_version:
                self._adapter_updated(adapter, "keep")

    def _adapter_updated(self, adapter: GroupAdapter, running: RunningRequests) -> None:
        scheduler = self._context.scheduler
        assert isinstance(scheduler, AdaptingScheduler), "otherwise it is refused"
        scheduler.use_adapter(adapter, running, len(self._context.steps.in_flight))
