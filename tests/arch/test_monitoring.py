"""The dashboard and the alert rules read metrics, labels and label values that are exported."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from rpc_schema import health, lease
from rpc_schema import lifecycle as lc
from rpc_schema.errors import ErrorCode
from worker_client.service.metrics.table import SERVICE_METRICS, VLLM_METRICS
from worker_client.wire.liveness import Liveness
from worker_daemon.server.metrics.table import DAEMON_METRICS
from worker_host.metrics import MetricKind

FOLDER = Path(__file__).parents[2] / "docker" / "monitoring"
METRICS = (*DAEMON_METRICS, *SERVICE_METRICS, *VLLM_METRICS)
SERIES = {name: metric for metric in METRICS for name in metric.series}
SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""
VALUES = {
    "axis": {"load", "link", "serving", "lease", "weights", "kv_cache"},
    "code": {*ErrorCode, *map(str, range(400, 600))},
    "result": {"ok", "failed"},
    "outcome": {"stop", "length", "abort", "error", "refused"},
    "state": {
        *get_args(health.LoadState),
        *get_args(health.ServingState),
        *get_args(lc.LinkState),
        *get_args(lease.LeaseState),
        *get_args(Liveness),
    },
    "kind": {"weights", "kv_cache", "graphs", "activations", "context", "others", "free"},
}
NAME = re.compile(r"\b(?:worker_daemon|worker_service|process)_\w+|vllm:\w+")
SELECTOR = re.compile(rf"({NAME.pattern})(?:\{{([^}}]*)\}})?(\[[^\]]+\])?")
MATCH = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')


def dashboard():
    return json.loads((FOLDER / "dashboard.json").read_text())


def rules():
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def labels_of(expression):
    return {label for name in NAME.findall(expression) for label in SERIES[name].labels}


def expressions():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for rule in rules():
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(
    ("title", "expression"), [pytest.param(*e, id=e[0]) for e in expressions()]
)
def test_expression_reads_what_is_exported(title, expression):
    assert expression.count("(") == expression.count(")"), title
    selected = SELECTOR.findall(expression)
    assert selected, "it reads no metric of ours"
    known = set(SCRAPED)
    for name, matches, interval in selected:
        assert name in SERIES, name
        metric = SERIES[name]
        labels = {*metric.labels, *SCRAPED, *(["le"] if name.endswith("_bucket") else [])}
        known |= labels
        for label, operator, text in MATCH.findall(matches):
            assert label in labels, f"{name} has no label {label}"
            if label in VALUES:
                assert set(text.split("|") if "~" in operator else [text]) <= VALUES[label]
        grows = metric.kind is not MetricKind.GAUGE
        assert bool(interval) == grows, f"{name} is a {metric.kind}: rate() or not"
    for names in re.findall(r"\bby \(([^)]*)\)", expression):
        assert {each.strip() for each in names.split(",")} <= known
    if "histogram_quantile" in expression:
        assert all(re.search(r"\ble\b", by) for by in re.findall(r"\bby \(([^)]*)\)", expression))


def test_legends_and_variables_name_labels_that_are_there():
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            labels = {
                label for name in NAME.findall(target["expr"]) for label in SERIES[name].labels
            }
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= labels | SCRAPED, panel["title"]
    queried = [
        each["definition"] for each in dashboard()["templating"]["list"] if "definition" in each
    ]
    assert len(queried) == 2
    for definition in queried:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition).groups()
        assert name in SERIES and label in SCRAPED


def test_rules_have_a_severity_a_summary_and_a_name_of_their_own():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        used = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        labels = labels_of(rule["expr"])
        assert set(used) <= labels | SCRAPED, rule["alert"]


def test_panels_do_not_overlap():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
