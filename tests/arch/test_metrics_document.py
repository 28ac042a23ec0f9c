"""docs/metrics.md matches the tables of exported metrics, and these follow Prometheus' rules."""

import re
from pathlib import Path

import pytest

from tests.support.metrics_document import render
from worker_client.service.metrics.table import SERVICE_METRICS
from worker_daemon.server.metrics.table import DAEMON_METRICS
from worker_host.metrics import ExportedMetric, MetricKind

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
TABLES = {"daemon": DAEMON_METRICS, "server": SERVICE_METRICS}
BASE_UNITS = ("_seconds", "_bytes", "_ratio", "_celsius", "_watts", "_info")
OTHER_UNITS = re.compile(r"_(ms|us|milliseconds|microseconds|percent|mb|gb|kb)(_|$)")


def test_document_is_made_from_the_tables():
    command = "python -m tests.support.metrics_document > docs/metrics.md"
    assert DOCUMENT.read_text() == render(), f"run: {command}"


@pytest.mark.parametrize("metrics", TABLES.values(), ids=list(TABLES))
def test_names_and_labels_follow_prometheus_rules(metrics: tuple[ExportedMetric, ...]):
    """https://prometheus.io/docs/practices/naming: base units, _total on counters alone."""
    assert len({each.name for each in metrics}) == len(metrics) > 10
    for each in metrics:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", each.name), each.name
        assert each.name.endswith("_total") == (each.kind is MetricKind.COUNTER), each.name
        assert not OTHER_UNITS.search(each.name), each.name
        assert each.kind is not MetricKind.HISTOGRAM or each.name.endswith(BASE_UNITS), each.name
        assert each.help.endswith("."), each.name
        assert not set(each.labels) & {"le", "quantile", "job", "instance"}, each.name
