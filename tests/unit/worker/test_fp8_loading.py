"""A KV cache in FP8: devices and models that it is refused for, and what a worker says of it."""

import pytest
import torch
from worker_driver import WorkerDriver

from rpc_schema import config, lifecycle
from rpc_schema.errors import ConfigError
from worker_daemon.backend import choose_backend
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.worker.loading import load
from worker_daemon.worker.stage_loading import RankPlace, Roots

CPU = torch.device("cpu")


def load_on_gpu(model_root, model, **cache):
    """Load a model with a cache, in FP8 by default, on a device that is checked before it is
    used."""
    place = RankPlace(
        torch.device("cuda:0"),
        config.ParallelConfig(),
        ParallelState(1, 1, 0),
        SingleRank(),
        choose_backend(CPU),
    )
    message = lifecycle.LoadModel(
        epoch=1,
        link=1,
        seq=1,
        model=config.ModelConfig(model=model),
        scheduler=config.SchedulerConfig(),
        cache=config.CacheConfig(**{"kv_cache_dtype": "fp8"} | cache),
        graph=config.GraphConfig(),
    )
    return load(message, place, Roots([model_root], None), lambda phase, seconds, done=0.0: None)


@pytest.mark.parametrize(
    ("capability", "head_dim", "problem"),
    [((8, 0), 64, "below 8.9"), ((8, 6), 64, "below 8.9"), ((9, 0), 24, "multiple of 16")],
)
@pytest.mark.usefixtures("llama")
def test_what_cannot_have_it_is_refused_by_name(
    monkeypatch, model_root, copy_config, capability, head_dim, problem
):
    copy_config("other-heads", head_dim=head_dim)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(ConfigError, match=problem) as raised:
        load_on_gpu(model_root, "other-heads")
    assert raised.value.field == "cache.kv_cache_dtype"
    assert "auto" in str(raised.value)


@pytest.mark.parametrize(
    ("capability", "kv_cache_dtype", "problem", "fix"),
    [((9, 0), "auto", "KV cache in FP8", "kv_cache_dtype fp8"), ((8, 9), "fp8", "9 or more", "")],
)
@pytest.mark.usefixtures("llama")
def test_products_in_fp8_are_refused_without_its_cache_or_kernels(
    monkeypatch, model_root, copy_config, capability, kv_cache_dtype, problem, fix
):
    copy_config("wide-heads", head_dim=64)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    with pytest.raises(ConfigError, match=problem) as raised:
        load_on_gpu(
            model_root, "wide-heads", kv_cache_dtype=kv_cache_dtype, prompt_attention_dtype="fp8"
        )
    assert (raised.value.field, raised.value.value) == ("cache.prompt_attention_dtype", "fp8")
    assert "auto" in str(raised.value) and fix in str(raised.value)


@pytest.mark.usefixtures("llama")
def test_products_in_fp8_are_refused_on_a_cpu_and_the_worker_loads_without(make_worker):
    driver = WorkerDriver(make_worker())
    driver.init_device()
    wanted = config.CacheConfig(kv_cache_dtype="fp8", prompt_attention_dtype="fp8")
    with pytest.raises(ConfigError, match="compute capability 9"):
        driver.load_model("llama", cache=wanted)
    driver.load_model("llama", cache=config.CacheConfig(kv_cache_dtype="fp8"))


@pytest.mark.usefixtures("llama")
def test_layers_and_groups_name_the_dtype(make_worker):
    wide, narrow = WorkerDriver(make_worker()), WorkerDriver(make_worker())
    for driver in (wide, narrow):
        driver.init_device()
    wide.load_model("llama")
    narrow.load_model("llama", cache=config.CacheConfig(kv_cache_dtype="fp8"))
    specs = []
    for driver in (wide, narrow):
        message = lifecycle.GetKVCacheSpec(**driver.ids())
        specs.append(driver.worker.get_kv_cache_spec(message).layers)
    for before, after in zip(*specs, strict=True):
        assert (before.dtype, after.dtype) == ("float32", "float8_e4m3fn")
        assert before.bytes_per_token == 4 * after.bytes_per_token
    narrow.profile()
    narrow.allocate()
    assert {group.dtype for group in narrow.worker.describe().kv_cache.groups} == {"float8_e4m3fn"}
