"""Settings that replicas cannot have together if they share experts: refused by name, before
anything is loaded."""

import pytest
import torch

from rpc_schema.config import GraphConfig
from rpc_schema.errors import ConfigError
from worker_daemon.worker.resolve import check_shared_experts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EAGER, GRAPHS = GraphConfig(enforce_eager=True), GraphConfig()


def test_graphs_are_refused_where_there_are_any():
    check_shared_experts(EAGER, GPU)
    check_shared_experts(GRAPHS, CPU)
    with pytest.raises(ConfigError, match="fix: True") as caught:
        check_shared_experts(GRAPHS, GPU)
    assert (caught.value.field, caught.value.value) == ("graph.enforce_eager", False)
