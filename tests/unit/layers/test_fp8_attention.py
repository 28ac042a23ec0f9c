"""A KV cache in FP8 in plain torch: what is stored, and attention over it against fp64 over the
same cache in float32."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.layer_reference import Heads, make_projected
from benchmarks.paged_reference import Shape, dense_attention, make_batch, relative_error
from tests.support.attention_steps import layer_of
from tests.support.fp8_caches import BOUNDS, in_fp8, random_scales, store
from tests.support.layer_checks import run_projection
from worker_daemon.layers.fp8_cache import dequantize, quantize
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps

SEED = random.randrange(1 << 30)
MIXED = [(18, 70), (1, 65), (0, 9), (1, 1), (5, 64), (20, 20)]


def e4m3_values() -> torch.Tensor:
    """Return all finite values of e4m3 that are not negative, ascending, from its definition."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # NaN
    ]
    return torch.tensor([*subnormal, *normal], dtype=torch.float64)


def test_values_are_rounded_to_the_nearest() -> None:
    values = e4m3_values()
    assert values[-1] == 448
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(4000, 2, 8, generator=generator) * 100
    scales = random_scales(2, "cpu", SEED).values[0]
    stored = quantize(x, scales)
    scaled = (x / scales[:, None]).double()
    distances = (scaled.abs().flatten()[:, None] - values).abs()
    assert torch.equal(
        (stored.double() - scaled.clamp(-448, 448)).abs().flatten(),
        (distances.min(1).values - (scaled.abs().flatten() - 448).clamp(min=0)),
    )
    assert torch.equal(dequantize(stored, scales), stored.float() * scales[:, None])


def test_values_beyond_the_range() -> None:
    x = torch.tensor([[448.0, 449.0, 1e30, float("inf"), float("nan"), 1e-9, -1e9, 0.0]])
    stored = quantize(x.unsqueeze(0), torch.ones(1)).float().flatten()
    assert stored[[0, 1, 2, 3]].tolist() == [448.0] * 4
    assert stored[4].isnan()
    assert stored[5:].tolist() == [0.0, -448.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_are_stored(dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 16, is_normed=True)
    generator = torch.Generator().manual_seed(SEED)
    step = make_projected(heads, 9, dtype, generator)
    wide = step.kv_cache.clone()
    qkv = step.qkv.clone()
    expected_q = run_projection(TorchOps(), step, wide)
    scales = random_scales(2, "cpu", SEED)
    narrow = torch.zeros(wide.shape, dtype=torch.float8_e4m3fn)
    q = run_projection(TorchOps(), replace(step, qkv=qkv), narrow, kv_scales=scales)
    assert torch.equal(q, expected_q)
    block = step.slot_mapping // heads.block_size
    offset = step.slot_mapping % heads.block_size
    for which in (0, 1):
        expected = quantize(wide[block, which, offset], scales.values[which])
        assert torch.equal(narrow[block, which, offset].float(), expected.float())


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(head_dim: int, window: int | None, dtype: torch.dtype) -> None:
    shape = Shape(4, 2, head_dim)
    batch = make_batch(shape, MIXED, dtype=dtype, device="cpu", seed=SEED)
    scales = random_scales(2, "cpu", SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    layer = replace(layer_of(shape, window), kv_scales=scales)
    out = TorchPagedAttention().attend(batch.q, batch.kv_cache, layer, batch.metadata)
    assert out.dtype == dtype
    assert relative_error(out, dense_attention(batch, window)) < BOUNDS[dtype]


@pytest.mark.parametrize("window", [None, 13])
def test_a_prompt_in_chunks_gives_the_same(window: int | None) -> None:
    """Each chunk reads what the earlier ones and itself have stored."""
    shape, length = Shape(4, 2, 64), 70
    whole = make_batch(shape, [(length, length)], dtype=torch.float32, device="cpu", seed=SEED)
    scales = random_scales(2, "cpu", SEED)
    whole = in_fp8(whole, scales)
    store(whole, scales)
    layer = replace(layer_of(shape, window), kv_scales=scales)
    expected = TorchPagedAttention().attend(whole.q, whole.kv_cache, layer, whole.metadata)
    for start, stop in ((0, 16), (16, 33), (33, 69), (69, 70)):
        metadata = replace(
            whole.metadata,
            query_lens_np=whole.metadata.query_lens_np * 0 + (stop - start),
            seq_lens=torch.tensor([stop]),
        )
        part = whole.q[start:stop]
        out = TorchPagedAttention().attend(part, whole.kv_cache, layer, metadata)
        assert relative_error(out, expected[start:stop]) < 1e-6
