"""Settings that replicas cannot have together if they share experts: refused by name, before
anything is loaded."""

import pytest
import torch

from rpc_schema.config import GraphConfig, ModelConfig
from rpc_schema.errors import ConfigError
from worker_daemon.worker.resolve import check_shared_experts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
EAGER, GRAPHS = GraphConfig(enforce_eager=True), GraphConfig()


def model_of(load_format="auto"):
    return ModelConfig(model="/models/any", load_format=load_format, enable_expert_parallel=True)


def test_graphs_are_refused_where_there_are_any():
    check_shared_experts(model_of(), EAGER, GPU)
    check_shared_experts(model_of(), GRAPHS, CPU)
    with pytest.raises(ConfigError, match="fix: True") as caught:
        check_shared_experts(model_of(), GRAPHS, GPU)
    assert (caught.value.field, caught.value.value) == ("graph.enforce_eager", False)


@pytest.mark.parametrize("load_format", ["sharded_state", "tensorizer"])
def test_sets_of_one_replica_are_refused(load_format):
    with pytest.raises(ConfigError, match="fix: auto") as caught:
        check_shared_experts(model_of(load_format), EAGER, GPU)
    assert (caught.value.field, caught.value.value) == ("load_format", load_format)
