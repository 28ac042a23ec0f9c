"""Metrics in Prometheus' text format, by prometheus-client. Imported only by processes that export
them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from worker_host.metrics import ExportedMetric, HistogramCounts, MetricKind, MetricReadings, Reading

FRESH_S: Final = 1.0
"""Age up to which rendered metrics are sent again."""


class _Sole(Collector):
    """A collector of one metric, so that each can be rendered alone."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        """Yield it."""
        yield self._family


def render_metric(metric: ExportedMetric, readings: Iterable[Reading]) -> bytes:
    """Return a metric's description and series, in text format 0.0.4."""
    name = metric.name
    if metric.kind is MetricKind.COUNTER:
        name = name.removesuffix("_total")  # the library appends it again
    family = Metric(name, metric.help, metric.kind)
    for values, reading in readings:
        labels = dict(zip(metric.labels, values, strict=True))
        if isinstance(reading, HistogramCounts):
            _add_histogram(family, labels, reading)
        else:
            family.add_sample(metric.name, labels, reading)
    return generate_latest(_Sole(family))


def _add_histogram(family: Metric, labels: dict[str, str], counts: HistogramCounts) -> None:
    so_far, each = 0, counts.counts.copy()
    for bound, count in zip((*map(str, counts.bounds), "+Inf"), each, strict=True):
        so_far += count
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, so_far)
    family.add_sample(f"{family.name}_sum", labels, counts.total)
    family.add_sample(f"{family.name}_count", labels, so_far)


class RenderedMetrics:
    """The metrics of this process as text: those of its table, and those that every Prometheus
    client exports (process_cpu_seconds_total, process_resident_memory_bytes and so on, from /proc).

    Belongs to an event loop. They are rendered at most once a second and one at a time. The loop
    runs between two of them, so that neither its other work nor another thread waits long for the
    interpreter.
    """

    content_type: str = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        read: Callable[[], Iterable[MetricReadings]],
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """read: returns the present values. prepare: is awaited before them."""
        self._read = read
        self._prepare = prepare
        self._process = ProcessCollector(registry=None)
        self._lock = asyncio.Lock()
        """Held while they are rendered, so that readers at the same time share one text."""
        self._text = b""
        self._rendered_at = float("-inf")

    async def text(self) -> bytes:
        """Return them, at most FRESH_S old."""
        async with self._lock:
            if time.monotonic() - self._rendered_at > FRESH_S:
                self._text = await self._render()
                self._rendered_at = time.monotonic()
        return self._text

    async def _render(self) -> bytes:
        if self._prepare is not None:
            await self._prepare()
        parts = []
        for metric, readings in self._read():
            parts.append(render_metric(metric, readings))
            await asyncio.sleep(0)  # the loop's wait releases the interpreter
        parts.append(generate_latest(self._process))
        return b"".join(parts)
