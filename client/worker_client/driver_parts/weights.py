"""Tells a scheduler which weights the group and its adapters have, so that it reuses no KV of
others."""

from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.errors import WorkerDied
from worker_client.group.loras import GroupAdapter, GroupLoras
from worker_client.group.running import RunningRequests
from worker_client.group.weights import GroupWeights
from worker_client.scheduler import (
    AdaptingScheduler,
    RecomputingScheduler,
    SuspendingScheduler,
    VersionedScheduler,
)


class WeightsPart(DriverPart):
    """Passes on each version of the weights, and of an adapter's; has requests recomputed between
    steps. Of several drivers of a group, the newest one passes them on."""

    def __init__(self, context: DriverContext) -> None:
        self._context = context
        self._follow_adapters()
        scheduler = context.scheduler
        weights: GroupWeights | None = getattr(context.group, "weights", None)
        self._weights = weights
        if weights is None:
            return
        weights.planned = lambda: context.steps.unsent
        recomputation = weights.recomputation
        weights.on_version = recomputation.on_complete = recomputation.on_waiting = None
        if isinstance(scheduler, SuspendingScheduler):
            recomputation.on_waiting = scheduler.await_recompute
        if not isinstance(scheduler, VersionedScheduler):
            return
        weights.on_version = scheduler.use_weights
        if isinstance(scheduler, RecomputingScheduler):
            recomputation.on_complete = scheduler.share_recomputed
        if weights.version is not None:
            scheduler.use_weights(weights.version)

    def prepare(self) -> None:
        weights = self._weights
        if weights is None or not weights.recomputation.is_pending:
            return
        if not self._context.scheduler.has_unfinished_requests():
            return
        try:
            weights.recomputation.advance()
        except WorkerDied as died:
            self._context.replace(died)

    def wait(self) -> bool:
        return self._weights is not None and self._weights.recomputation.is_pending

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
