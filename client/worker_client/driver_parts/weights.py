"""Tells a scheduler which weights the group has, so that it reuses no KV of others."""

from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart
from worker_client.group.weights import GroupWeights
from worker_client.scheduler import RecomputingScheduler, VersionedScheduler


class WeightsPart(DriverPart):
    """Passes on each version of the weights. Of several drivers of a group, the newest one does."""

    def __init__(self, context: DriverContext) -> None:
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
