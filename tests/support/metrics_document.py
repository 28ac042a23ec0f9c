"""`python -m tests.support.metrics_document > docs/metrics.md`: the document of the exported
metrics, made from their tables."""

import sys
from collections.abc import Sequence

from worker_daemon.server.metrics.table import DAEMON_METRICS
from worker_host.metrics import ExportedMetric

INTRODUCTION = """\
# Metrics and health

Made by `python -m tests.support.metrics_document > docs/metrics.md`.

    worker-daemon serve ... --metrics-listen unix:/DIR/NAME
    worker-daemon serve ... --metrics-listen 10.0.0.7:9100 --metrics-token-file FILE
    curl --unix-socket /DIR/NAME http://localhost/metrics

| path | answer |
|---|---|
| `/metrics` | Prometheus' text format 0.0.4, rendered at most once a second |
| `/livez` | 200, or 503 if the process cannot work, as `worker-probe live` |
| `/readyz` | 200, or 503 without a ready model or while draining, as `worker-probe ready` |
| `/startupz` | 200, or 503 until the worker is made |

Probes answer with JSON: `{"status":"unavailable","reasons":["its model is not ready: CREATED"]}`.
At a port, probes without the token get no reasons, and `/metrics` is refused
([security](security.md#metrics)).

Scrapes do not wait for steps, nor steps for scrapes: steps only count, in numbers that were
allocated before. Prometheus' usual metrics of a process (`process_resident_memory_bytes`,
`process_cpu_seconds_total`, `process_open_fds` and so on) are exported too.
"""


def table_of(metrics: Sequence[ExportedMetric]) -> str:
    """Return a Markdown table of metrics."""
    rows = [
        f"| `{each.name}` | {each.kind} | {', '.join(each.labels)} | {each.help} |"
        for each in metrics
    ]
    return "\n".join(("| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""))


def render() -> str:
    """Return the whole document."""
    return "\n".join((INTRODUCTION, "## Daemon", "", table_of(DAEMON_METRICS)))


if __name__ == "__main__":
    sys.stdout.write(render())
