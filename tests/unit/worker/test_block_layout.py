"""Models whose blocks another group can use: all that are served, and none of a family whose layers
keep pages of different forms."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rpc_schema.config import CacheConfig, ModelConfig
from rpc_schema.errors import ConfigError
from rpc_schema.kv_cache import build_kv_cache_config, plan_groups
from tests.support.families import latent
from tests.support.published import PUBLISHED, shrunk
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.models.config import read_model_config
from worker_daemon.models.fields import Fields
from worker_daemon.runner.kv_cache import describe_layers
from worker_daemon.worker.block_layout import block_parts, own_shard

TP = 2


def shard_of(decoder, dtype):
    """A rank's half of a model's heads."""
    specs = decoder.cache_specs(range(decoder.num_hidden_layers), TP)
    layers = describe_layers(specs, dtype)
    plan = build_kv_cache_config(plan_groups([layers], 16, 8192, 512), 0, num_blocks=9)
    config = SimpleNamespace(model=ModelConfig(model="m"), cache=CacheConfig())
    resolved = SimpleNamespace(decoder=decoder)
    model = SimpleNamespace(resolved=resolved, config=config, draft=None, kv_cache_specs=layers)
    parallel = ParallelState(1, TP, 1)
    return own_shard(plan, model, parallel, block_parts(plan, model, parallel)).described


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_of_a_model_have_pages_of_one_form(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(shrunk(PUBLISHED[name])))
    decoder = read_model_config(tmp_path)
    shard = shard_of(decoder, torch.bfloat16)
    assert len(shard.layer_names) == decoder.num_hidden_layers
    heads = decoder.heads
    assert shard.num_heads == max(1, heads.num_key_value_heads // TP)
    assert shard.first_head == heads.num_key_value_heads // TP
    assert (shard.rows, shard.words) == (2 * 16, heads.head_dim // 2)


def test_layers_that_differ_are_refused_by_name(tmp_path):
    fields = {**PUBLISHED["Qwen/Qwen3-0.6B"], **latent.SMALL, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    decoder = read_model_config(tmp_path)
    others = latent.describe(Fields(fields)).layers
    mixed = replace(decoder, layers=(*decoder.layers[:2], *others[:2]))
    assert shard_of(replace(decoder, layers=others), torch.float32)
    with pytest.raises(ConfigError, match=r"different forms.*model\.model = 'm'; fix: let the"):
        shard_of(mixed, torch.float32)
