"""Metrics that a process exports: rows of its table, from which the exposition and the documents
are made, and counts that are cheap enough for a step."""

import enum
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


class MetricKind(enum.StrEnum):
    """Type of a metric, by Prometheus' name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """One row of a process's table of metrics."""

    name: str
    """Full name; a counter's ends in _total."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """Names of its series in a query."""
        if self.kind is not MetricKind.HISTOGRAM:
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


class HistogramCounts:
    """A histogram's counts. Written by one thread at a time, read by any: a reader may see an
    observation in `counts` and not yet in `total`."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the largest value of each bucket, ascending; a last bucket has no bound."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations of each bucket alone."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as it occurred."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


Reading: TypeAlias = tuple[tuple[str, ...], float | HistogramCounts]
"""A metric's value for some values of its labels, which are in the order of its row."""
MetricReadings: TypeAlias = tuple[ExportedMetric, Sequence[Reading]]
"""A metric with its values."""
