"""The size of the host tier: what the operator, the host and the model allow."""

from types import SimpleNamespace

import pytest
import torch

from rpc_schema.config import CacheConfig
from rpc_schema.errors import CapacityError, ConfigError
from rpc_schema.kv_cache import KVCacheConfig
from worker_daemon.worker import host_memory
from worker_daemon.worker.host_memory import check_host_memory, open_tier_memory
from worker_daemon.worker.resolve import check_connector

CPU = torch.device("cpu")


def model(*, keeps_state=False, routed_experts=None):
    decoder = SimpleNamespace(keeps_state=keeps_state)
    return SimpleNamespace(decoder=decoder, routed_experts=routed_experts)


def plan(**fields):
    usual = {"num_blocks": 4, "block_size": 4, "groups": (), "size_bytes": 256}
    return KVCacheConfig(**{**usual, **fields})


@pytest.mark.parametrize(
    ("refused", "lockstep", "said"),
    [
        (model(keeps_state=True), False, "a state per request"),
        (model(routed_experts=object()), False, "leave out enable_return_routed_experts"),
        (model(), True, "replicas with steps of their own"),
    ],
)
def test_models_that_cannot_have_it(refused, lockstep, said):
    with pytest.raises(ConfigError, match=said):
        check_connector(CacheConfig(kv_host_memory_bytes=1), refused, in_lockstep=lockstep)
    check_connector(CacheConfig(), refused, in_lockstep=lockstep)


def test_the_operators_bound():
    cache = CacheConfig(kv_host_memory_bytes=1001)
    check_host_memory(cache, None)
    check_host_memory(cache, 1001)
    with pytest.raises(ConfigError, match=r"kv_host_memory_bytes = 1001.*at most 1000"):
        check_host_memory(cache, 1000)


@pytest.mark.parametrize(
    ("fields", "cache_bytes", "said"),
    [
        ({"num_host_blocks": 9}, 64 * 8, "num_host_blocks = 9.*at most 8"),
        ({"num_host_blocks": 1, "draft_bytes": 4 * 6}, 64 * 8, "whole number of words"),
        ({"num_host_blocks": 1, "size_bytes": 0}, 64 * 8, "whole number of words"),
    ],
)
def test_plans_that_do_not_fit(fields, cache_bytes, said):
    with pytest.raises(ConfigError, match=said):
        open_tier_memory(plan(**fields), CacheConfig(kv_host_memory_bytes=cache_bytes), CPU, 0)


def test_device_memory_is_not_the_hosts():
    """No bound of the operator concerns it, and it cannot outlive the daemon."""
    cache = CacheConfig(kv_host_memory_bytes=1001, kv_tier_memory="device")
    check_host_memory(cache, 1000)
    with pytest.raises(ConfigError, match=r"kv_tier_memory = .?device.*without --kv-host-dir"):
        check_host_memory(cache, None, SimpleNamespace())


def test_the_hosts_memory(monkeypatch):
    cache = CacheConfig(kv_host_memory_bytes=64 * 8)
    monkeypatch.setattr(host_memory, "host_room_bytes", lambda: host_memory.RESERVE_BYTES + 511)
    with pytest.raises(CapacityError, match="at most 511"):
        open_tier_memory(plan(num_host_blocks=8), cache, CPU, 0)
    with pytest.raises(CapacityError, match="takes 518 bytes"):
        open_tier_memory(plan(num_host_blocks=7), cache, CPU, checksum_bytes=10)
    rows = open_tier_memory(plan(num_host_blocks=7), cache, CPU, checksum_bytes=8).rows.rows
    assert rows.shape == (7, 72)
    assert not rows.any()
    assert open_tier_memory(plan(), cache, CPU, 8) is None
