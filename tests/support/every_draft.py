"""A reference scheduler for tests of drafts: those on slow hosts, or with drafts that are mostly
wrong, must have them too."""

from worker_client.scheduler import Scheduler, SchedulerLimits


def every_draft(limits: SchedulerLimits) -> Scheduler:
    """Return a scheduler that gives each request as many drafts as there is room for: its clock
    stands still, and so no step seems to cost more than another. Without drafts, a usual one."""
    if not limits.num_speculative_tokens:
        return Scheduler(limits)
    return Scheduler(limits, clock=lambda: 0.0)
