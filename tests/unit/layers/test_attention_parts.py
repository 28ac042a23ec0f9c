"""Log-sum-exps of attention in plain torch, and merges of attention over parts of the keys: against
a dense fp64 softmax, torch's flex attention and transformers."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from transformers.models.gpt_oss import modeling_gpt_oss

from benchmarks.paged_reference import PagedBatch, Shape, dense_with_lse, make_batch
from tests.support.attention_parts import (
    attend_with_lse,
    check_attended,
    check_merge,
    check_parts,
    random_borders,
)
from tests.support.attention_steps import layer_of, random_sinks
from tests.support.fp8_caches import BOUNDS, in_fp8, random_scales, store
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention

SEED = random.randrange(1 << 30)
SHAPE = Shape(6, 2, 16)
BY_TOKEN = Shape(6, 2, 16, block_size=1)  # so that a part may begin at any key
MIXED = [(18, 70), (1, 65), (0, 9), (1, 1), (300, 300), (20, 20)]
BACKEND = TorchPagedAttention()


def build(
    shape: Shape, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> PagedBatch:
    batch = make_batch(shape, lengths, dtype=dtype, device="cpu", seed=SEED, num_padding=2)
    batch.store()
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(None, False), (0.8, False), (5.0, True)])
def test_log_sum_exps(
    dtype: torch.dtype, window: int | None, logit_softcap: float | None, has_sinks: bool
) -> None:
    batch = build(SHAPE, MIXED, dtype)
    sinks = random_sinks(SHAPE.num_q_heads, dtype, seed=SEED) if has_sinks else None
    options = {"logit_softcap": logit_softcap, "sinks": sinks}
    layer = layer_of(SHAPE, window, **options)
    out, lse = attend_with_lse(BACKEND, batch, layer)
    check_attended(out, lse, dense_with_lse(batch, window, **options), BOUNDS[dtype])


def test_over_a_cache_in_fp8() -> None:
    batch = build(SHAPE, MIXED, torch.bfloat16)
    scales = random_scales(2, "cpu", SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    layer = replace(layer_of(SHAPE), kv_scales=scales)
    out, lse = attend_with_lse(BACKEND, batch, layer)
    check_attended(out, lse, dense_with_lse(batch, None), BOUNDS[torch.bfloat16])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("lengths", [(1, 30), (20, 33)], ids=str)
def test_log_sum_exps_are_those_of_flex_attention(
    lengths: tuple[int, int], window: int | None
) -> None:
    batch = build(SHAPE, [lengths])
    num_queries, num_keys = lengths
    past, span = num_keys - num_queries, window or num_keys

    def visible(b, h, query, key):
        return (key <= query + past) & (key > query + past - span)

    def capped(score, b, h, query, key):
        return 2.0 * torch.tanh(score / 2.0)

    (history,) = batch.history
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (batch.q[:num_queries], *history))
    mask = create_block_mask(visible, None, None, num_queries, num_keys, device="cpu")
    for logit_softcap, score_mod in ((None, None), (2.0, capped)):
        expected, aux = flex_attention(
            q, k, v, score_mod=score_mod, block_mask=mask, scale=SHAPE.scale, enable_gqa=True,
            return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        layer = layer_of(SHAPE, window, logit_softcap)
        out, lse = attend_with_lse(BACKEND, batch, layer)
        exact = expected[0].transpose(0, 1), aux.lse[0].t()
        check_attended(out[:num_queries], lse[:num_queries], exact, 1e-5)


def test_sinks_have_the_share_that_transformers_gives_them() -> None:
    batch = build(SHAPE, [(1, 30)])
    sinks = random_sinks(SHAPE.num_q_heads, torch.float32, seed=SEED)
    module = SimpleNamespace(num_key_value_groups=3, sinks=sinks.values, training=False)
    (history,) = batch.history
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (batch.q[:1], *history))
    _, weights = modeling_gpt_oss.eager_attention_forward(module, q, k, v, None, SHAPE.scale)
    _, lse = attend_with_lse(BACKEND, batch, layer_of(SHAPE, sinks=sinks))
    shares = (sinks.values - lse[0]).exp()
    assert torch.allclose(shares, 1 - weights.sum(-1).flatten(), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(None, False), (2.0, True)])
def test_merged_parts_are_the_whole(
    dtype: torch.dtype, logit_softcap: float | None, has_sinks: bool
) -> None:
    rng = random.Random(SEED)
    sinks = random_sinks(BY_TOKEN.num_q_heads, dtype, seed=SEED) if has_sinks else None
    lengths = [(18, 70), (1, 65), (0, 9), (1, 1), (30, 30), (2, 90)]
    batch = build(BY_TOKEN, lengths, dtype)
    for count in (1, 3):
        borders = random_borders(batch, count, rng)
        print(borders)
        check_parts(
            BACKEND, batch, layer_of(BY_TOKEN, None, logit_softcap, sinks), borders, BOUNDS[dtype]
        )


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_merges(dtype: torch.dtype) -> None:
    check_merge(BACKEND, dtype, "cpu", BOUNDS[dtype])


def test_without_a_cache_there_is_no_key() -> None:
    batch, backend = build(SHAPE, MIXED), NullAttention()
    out, lse = attend_with_lse(backend, batch, layer_of(SHAPE))
    assert lse.isneginf().all()
    assert not out.any()
    merged = backend.merge(torch.stack((out, out)), torch.stack((lse, lse)))
    assert torch.equal(merged[0], out)
    assert torch.equal(merged[1], lse)
