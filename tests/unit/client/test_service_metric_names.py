"""A server's metrics under vLLM's names are those that vLLM has, with its types and labels, and
those that routers and dashboards read are among them."""

import pytest

from tests.support.vllm_metrics import known
from worker_client.service.metrics.table import VLLM_METRICS
from worker_host.metrics import HistogramCounts

ROUTERS = {
    "llm-d": (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:lora_requests_info",
        "vllm:cache_config_info",
    ),
    "production-stack": (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:gpu_cache_usage_perc",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_queries_total",
    ),
}
"""Metrics that they read from a server (documents and sources, 2026-11)."""
OURS = {each.name: each for each in VLLM_METRICS}
SET_BY_CONFIGURATION = "vllm:cache_config_info"
"""Its labels are those of a configuration; tests/vllm checks them."""


@pytest.mark.parametrize("metric", VLLM_METRICS, ids=list(OURS))
def test_metric_has_the_type_and_labels_of_vllms(metric):
    present, earlier = known()
    if metric.name in earlier:
        assert metric.kind == earlier[metric.name]
        assert metric.labels == ("model_name", "engine")
        return
    theirs = present[metric.name]
    assert metric.kind == theirs["type"]
    if metric.name != SET_BY_CONFIGURATION:
        assert sorted(metric.labels) == theirs["labels"]


@pytest.mark.parametrize("names", ROUTERS.values(), ids=list(ROUTERS))
def test_what_routers_read_is_exported(names):
    assert set(names) <= OURS.keys()


def test_a_value_that_comes_several_times_is_counted_so():
    counts = HistogramCounts((1.0, 2.0))
    counts.observe(1.5, 3)
    counts.observe(9.0)
    assert (counts.counts, counts.total) == ([0, 3, 1], 13.5)
