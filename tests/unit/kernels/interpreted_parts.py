"""Log-sum-exps of the attention kernels and merges of attention over parts of the keys, under
Triton's interpreter, against a dense fp64 softmax; conftest.py runs it.

fp32 and fp16 only, as in interpreted_attention.
"""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import PagedBatch, Shape, dense_with_lse, make_batch
from tests.support.attention_parts import (
    attend_with_lse,
    check_attended,
    check_merge,
    check_parts,
    keys_from,
    random_borders,
    rotate_with_lse,
)
from tests.support.attention_steps import layer_of, random_sinks
from tests.support.fp8_caches import BOUNDS, in_fp8, random_scales, store
from tests.support.rotated_decodes import make_decode
from worker_daemon.kernels.gathered_prefill import gathered_attention
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.kernels.tiles import DeviceLimits, Tile
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
SEED = random.randrange(1 << 30)
BACKEND, TORCH = TritonAttention(CPU), TorchPagedAttention()
MIXED = [(18, 70), (1, 65), (0, 9), (1, 1)]
DECODES = [(1, 1), (0, 7), (1, 90)]
OPTIONS = pytest.mark.parametrize(
    ("logit_softcap", "has_sinks"), [(None, False), (1.5, False), (None, True)]
)


def build(
    shape: Shape, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> PagedBatch:
    batch = make_batch(shape, lengths, dtype=dtype, device="cpu", seed=SEED, num_padding=2)
    batch.store()
    return batch


def options_of(num_heads: int, logit_softcap: float | None, has_sinks: bool) -> dict[str, object]:
    sinks = random_sinks(num_heads, torch.float32, seed=SEED) if has_sinks else None
    return {"logit_softcap": logit_softcap, "sinks": sinks}


@OPTIONS
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_log_sum_exps_of_steps(
    lengths: list[tuple[int, int]],
    window: int | None,
    logit_softcap: float | None,
    has_sinks: bool,
) -> None:
    batch = build(Shape(6, 2, 16), lengths)
    options = options_of(6, logit_softcap, has_sinks)
    out, lse = attend_with_lse(BACKEND, batch, layer_of(batch.shape, window, **options))
    check_attended(out, lse, dense_with_lse(batch, window, **options), 1e-5)


@OPTIONS
@pytest.mark.parametrize("num_splits", [1, 5])
def test_log_sum_exps_of_split_decodes(
    num_splits: int, logit_softcap: float | None, has_sinks: bool
) -> None:
    batch, options = build(Shape(3, 1, 16), DECODES), options_of(3, logit_softcap, has_sinks)
    lse = torch.full(batch.q.shape[:2], torch.nan)
    out = paged_attention(
        batch.q, batch.kv_cache, batch.metadata, scale=batch.shape.scale, window=None,
        num_splits=num_splits, tile=Tile(16, 16, 4, 3), lse=lse, **options,
    )  # fmt: skip
    check_attended(out, lse, dense_with_lse(batch, None, **options), 1e-5)


@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_log_sum_exps_over_fp8(lengths: list[tuple[int, int]]) -> None:
    batch, scales = build(Shape(4, 2, 64), lengths, torch.float16), random_scales(2, "cpu", SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    layer = replace(layer_of(batch.shape), kv_scales=scales)
    out, lse = attend_with_lse(BACKEND, batch, layer)
    check_attended(out, lse, dense_with_lse(batch, None), BOUNDS[torch.float16])


@pytest.mark.parametrize("num_sms", [1, 1024])
def test_log_sum_exps_of_decodes_that_rotate(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one kernel, or in two."""
    backend = TritonAttention(CPU)
    monkeypatch.setattr(backend, "_limits", DeviceLimits(num_sms, 96 * 1024))
    step = make_decode(
        Shape(4, 2, 32), [1, 17, 70], dtype=torch.float16, device="cpu", seed=SEED,
        num_padding=2, has_sinks=True,
    )  # fmt: skip
    step.batch.slot_mapping[-2:] = 0
    copy = step.on_copies()
    expected = rotate_with_lse(TORCH, copy, copy.layer(TorchOps(), None))
    out, lse = rotate_with_lse(backend, step, step.layer(TritonOps(CPU), None))
    check_attended(out, lse, expected, BOUNDS[torch.float16])


@OPTIONS
@pytest.mark.parametrize("window", [None, 33])
def test_log_sum_exps_over_gathered_keys(
    window: int | None, logit_softcap: float | None, has_sinks: bool
) -> None:
    options = options_of(4, logit_softcap, has_sinks)
    for lengths in [(37, 37), (17, 64)]:
        batch = make_batch(Shape(4, 2, 16), [lengths], dtype=torch.float32, device="cpu", seed=SEED)
        lse = torch.full(batch.q.shape[:2], torch.nan)
        out = gathered_attention(
            batch.q, batch.history[0].contiguous(), scale=batch.shape.scale, window=window,
            tile=Tile(16, 16, 4, 2), lse=lse, **options,
        )  # fmt: skip
        check_attended(out, lse, dense_with_lse(batch, window, **options), 1e-5)


@pytest.mark.parametrize("window", [None, 24])
def test_sequences_with_fewer_keys_than_queries(window: int | None) -> None:
    """As many tiles before the first key as there may be."""
    batch = build(Shape(2, 1, 16, 8), [(40, 50), (3, 40), (20, 20)])
    tile = Tile(16, 16, 4, 1)
    for first in (24, 48):
        part = keys_from(batch, first)
        lse = torch.full(batch.q.shape[:2], torch.nan)
        out = paged_attention(
            batch.q, batch.kv_cache, part, scale=batch.shape.scale, window=window, tile=tile,
            lse=lse,
        )  # fmt: skip
        expected = attend_with_lse(TORCH, batch, layer_of(batch.shape, window), part)
        check_attended(out, lse, expected, 1e-5)


@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(None, False), (1.5, True)])
def test_merged_parts_are_the_whole(logit_softcap: float | None, has_sinks: bool) -> None:
    batch = build(Shape(2, 1, 16, 1), [(3, 30), (1, 20), (0, 9), (1, 1)])
    borders = random_borders(batch, 2, random.Random(SEED))
    print(borders)
    layer = layer_of(batch.shape, None, **options_of(2, logit_softcap, has_sinks))
    check_parts(BACKEND, batch, layer, borders, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merges(dtype: torch.dtype) -> None:
    check_merge(BACKEND, dtype, "cpu", BOUNDS[dtype])
