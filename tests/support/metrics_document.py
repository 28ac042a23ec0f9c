"""`python -m tests.support.metrics_document > docs/metrics.md`: the document of the exported
metrics, made from their tables."""

import sys
from collections.abc import Sequence

from worker_client.service.metrics.table import SERVICE_METRICS, VLLM_METRICS
from worker_daemon.server.metrics.table import DAEMON_METRICS
from worker_host.metrics import ExportedMetric

INTRODUCTION = """\
# Metrics and health

Made by `python -m tests.support.metrics_document > docs/metrics.md`.

<!-- not run: parts of commands; tests/unit/server reads metrics so -->

    worker-daemon serve ... --metrics-listen unix:/DIR/NAME
    worker-daemon serve ... --metrics-listen 10.0.0.7:9100 --metrics-token-file FILE
    curl --unix-socket /DIR/NAME http://localhost/metrics

`worker-client serve` answers the same paths at its own port; `/metrics` needs a key, if the server
has any.

| path | answer |
|---|---|
| `/metrics` | Prometheus' text format 0.0.4, rendered at most once a second |
| `/livez` | 200, or 503 if the process cannot work: a daemon as `worker-probe live` |
| `/readyz` | 200, or 503 without a ready model or while draining: as `worker-probe ready` |
| `/startupz` | 200, or 503 until a daemon's worker is made, a server's model loaded |

Probes answer with JSON: `{"status":"unavailable","reasons":["its model is not ready: CREATED"]}`.
At a daemon's port, probes without the token get no reasons, and `/metrics` is refused
([security](security.md#metrics)).

Scrapes do not wait for steps, nor steps for scrapes (`python -m benchmarks.scrapes` measures it): a
step adds to numbers that were allocated before, and to none without `--metrics-listen`.
`docker/monitoring` has a Grafana dashboard, alert rules and a scrape configuration. Prometheus'
usual metrics of a process (`process_resident_memory_bytes`, `process_cpu_seconds_total`,
`process_open_fds` and so on) are exported too.
"""


SERVER = """
A request with n > 1 counts as n samples. Times are as the server's event loop sees them.
"""
VLLM = """
For dashboards and routers that read vLLM's metrics (0.33, and some earlier names). Left out: what
a server does not measure or have, such as the time in the queue.
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
    sections = (
        ("## Daemon", "", DAEMON_METRICS),
        ("## Server", SERVER, SERVICE_METRICS),
        ("## Server, under vLLM's names", VLLM, VLLM_METRICS),
    )
    texts = [f"{title}\n{text}\n{table_of(metrics)}" for title, text, metrics in sections]
    return "\n".join((INTRODUCTION, *texts))


if __name__ == "__main__":
    sys.stdout.write(render())
