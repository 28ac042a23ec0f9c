"""Capped scores and sinks in plain torch, against a dense fp64 softmax and transformers'
functions."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from benchmarks.paged_reference import Shape, dense_attention, make_batch, relative_error
from tests.support.attention_steps import layer_of, random_sinks
from tests.support.fp8_caches import BOUNDS, in_fp8, random_scales, store
from worker_daemon.layers.torch_attention import TorchPagedAttention

SEED = random.randrange(1 << 30)
SHAPE = Shape(6, 2, 16)
MIXED = [(18, 70), (1, 65), (0, 9), (1, 1), (300, 300), (20, 20), (270, 500)]
CAPS = pytest.mark.parametrize("logit_softcap", [None, 0.8, 50.0])
SINKS = pytest.mark.parametrize("has_sinks", [False, True])
BACKEND = TorchPagedAttention()


@CAPS
@SINKS
@pytest.mark.parametrize("window", [None, 1, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_steps(
    dtype: torch.dtype, window: int | None, has_sinks: bool, logit_softcap: float | None
) -> None:
    batch = make_batch(SHAPE, MIXED, dtype=dtype, device="cpu", seed=SEED, num_padding=3)
    batch.store()
    sinks = random_sinks(SHAPE.num_q_heads, dtype, seed=SEED) if has_sinks else None
    layer = layer_of(SHAPE, window, logit_softcap, sinks)
    out = BACKEND.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    assert out.dtype == dtype
    expected = dense_attention(batch, window, logit_softcap=logit_softcap, sinks=sinks)
    assert relative_error(out, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("window", [None, 21])
def test_over_a_cache_in_fp8(window: int | None) -> None:
    batch = make_batch(SHAPE, MIXED, dtype=torch.bfloat16, device="cpu", seed=SEED)
    scales, sinks = random_scales(2, "cpu", SEED), random_sinks(6, torch.bfloat16, seed=SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    layer = replace(layer_of(SHAPE, window, 2.0, sinks), kv_scales=scales)
    out = BACKEND.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    expected = dense_attention(batch, window, logit_softcap=2.0, sinks=sinks)
    assert relative_error(out, expected) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [(40, 40), (1, 30), (1, 1)], ids=str)
def test_sequences_are_those_of_transformers(lengths: tuple[int, int], window: int | None) -> None:
    batch = make_batch(SHAPE, [lengths], dtype=torch.float32, device="cpu", seed=SEED)
    batch.store()
    num_queries, num_keys = lengths
    queries = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    keys = torch.arange(num_keys)
    hidden = (keys > queries) | (keys <= queries - (window or num_keys))
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
    sinks = random_sinks(SHAPE.num_q_heads, torch.float32, seed=SEED)
    module = SimpleNamespace(num_key_value_groups=3, sinks=sinks.values, training=False)
    (history,) = batch.history
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (batch.q, *history))
    for layer, function, options in [
        (layer_of(SHAPE, window, sinks=sinks), modeling_gpt_oss.eager_attention_forward, {}),
        (layer_of(SHAPE, window, 1.5), modeling_gemma2.eager_attention_forward, {"softcap": 1.5}),
    ]:
        expected, _ = function(module, q, k, v, mask, scaling=SHAPE.scale, **options)
        out = BACKEND.attend(batch.q, batch.kv_cache, layer, batch.metadata)
        assert relative_error(out, expected.squeeze(0)) < 1e-5
