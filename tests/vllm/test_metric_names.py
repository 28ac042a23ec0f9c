"""The file of vLLM's metrics, with which tests outside of vLLM's environment compare ours, matches
the vLLM that is installed."""

import dataclasses

from vllm.config import CacheConfig

from tests.support.vllm_metrics import defined, known
from worker_client.service.metrics.table import V_CACHE


def test_file_is_what_vllm_defines():
    assert known()[0] == defined(), "run: python -m tests.support.vllm_metrics"


def test_labels_of_the_cache_are_fields_of_vllms():
    fields = {field.name for field in dataclasses.fields(CacheConfig)}
    assert set(V_CACHE.labels) - {"engine"} <= fields
