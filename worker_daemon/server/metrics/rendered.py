"""Renders the daemon's metrics, at most once a second and one at a time. The event loop runs
between two of them, so that the step thread never waits for the interpreter longer than for one."""

import asyncio
import time
from typing import Final

from worker_daemon.server.metrics.readings import DaemonReadings
from worker_daemon.server.session.expert_loads import ExpertLoadReader
from worker_host.exposition import CONTENT_TYPE, ProcessMetrics, render_metric

FRESH_S: Final = 1.0
"""Age up to which rendered metrics are sent again."""
EXPERTS_EVERY_S: Final = 10.0
"""Interval of reading the expert loads, which the step thread has to copy from the device."""


class RenderedMetrics:
    """The daemon's metrics as text, at most FRESH_S old."""

    content_type = CONTENT_TYPE

    def __init__(self, readings: DaemonReadings, expert_loads: ExpertLoadReader) -> None:
        self._expert_loads = expert_loads
        self._readings = readings
        self._process = ProcessMetrics()
        self._lock = asyncio.Lock()
        """Held while they are rendered, so that readers at the same time share one text."""
        self._text = b""
        self._rendered_at = float("-inf")
        self._experts_at = float("-inf")

    async def text(self) -> bytes:
        """Return them; render them first if the last ones are too old."""
        async with self._lock:
            if time.monotonic() - self._rendered_at > FRESH_S:
                self._text = await self._render()
                self._rendered_at = time.monotonic()
        return self._text

    async def _render(self) -> bytes:
        now = time.monotonic()
        if now - self._experts_at > EXPERTS_EVERY_S:
            self._experts_at = now
            await self._expert_loads.refresh()
        parts = []
        for metric, values in self._readings.read():
            parts.append(render_metric(metric, values))
            await asyncio.sleep(0)  # the loop's wait releases the interpreter
        parts.append(self._process.render())
        return b"".join(parts)
