"""Metrics in Prometheus' text format, by prometheus-client. Imported only by processes that export
them."""

from collections.abc import Iterable
from typing import Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from worker_host.metrics import ExportedMetric, HistogramCounts, MetricKind, Reading

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


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


class ProcessMetrics:
    """The metrics of this process that every Prometheus client exports: process_cpu_seconds_total,
    process_resident_memory_bytes, process_open_fds and so on, from /proc."""

    def __init__(self) -> None:
        self._collector = ProcessCollector(registry=None)

    def render(self) -> bytes:
        """Return them in text format 0.0.4."""
        return generate_latest(self._collector)
