"""Makes the text of the daemon's metrics; loads prometheus-client. Main thread only."""

import time
from collections.abc import Mapping
from typing import Final

from worker_daemon.server.metrics.counted_times import CountedTimes
from worker_daemon.server.metrics.readings import DaemonReadings
from worker_daemon.server.session.status import StatusReport
from worker_host.exposition import RenderedMetrics

EXPERTS_EVERY_S: Final = 10.0
"""Interval of reading the expert loads, which the step thread has to copy from the device."""


def rendered_metrics(
    report: StatusReport, counted: CountedTimes, startup_s: Mapping[str, float]
) -> RenderedMetrics:
    """Return the text of a daemon's metrics. startup_s: see DaemonReadings."""
    last_s = float("-inf")

    async def read_experts() -> None:
        nonlocal last_s
        now = time.monotonic()
        if now - last_s > EXPERTS_EVERY_S:
            last_s = now
            await report.expert_loads.refresh()

    return RenderedMetrics(DaemonReadings(report, counted, startup_s).read, read_experts)
