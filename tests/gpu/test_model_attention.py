"""The attention of published models on a GPU, at real sizes, in every path and with both forms of
cache, against a dense fp64 softmax: softcaps, sinks, windows, rotations and norms of heads."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import PagedBatch, dense_attention, relative_error
from tests.support.attention_steps import layer_of, token_rows
from tests.support.fp8_caches import check_paged, fp8_decode, in_fp8, random_scales, store
from tests.support.model_attention import MODEL_ATTENTION, SCORED, ModelAttention
from tests.support.rotated_decodes import BOUNDS, bound_of, check_cache, check_fused, check_output
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionBackend, AttentionLayer
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import choose_attention
from worker_daemon.layers.prompt_attention import PromptAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = random.randrange(1 << 30)
DEVICE = "cuda"
MIXED = [(1, 1500), (1, 3), (700, 700), (1, 257), (512, 5000), (0, 40), (33, 1000), (1, 64), (5, 5)]
LARGE = [(3000, 3000), (2503, 4501)]
SHORT = [500, 17, 130, 64]
SEQ_LENS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 500, 2047, 2048, 2049, 4097, 6000]
LONG = [
    (1, 1500), (1, 3), (1024, 1024), (1, 257), (512, 5000), (0, 40),
    (1950, 1950), (33, 1000), (1500, 1500), (1, 64), (1100, 6000),
]  # fmt: skip


def each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", [MODEL_ATTENTION[name] for name in names], ids=[*names])


ALL = each(*MODEL_ATTENTION)
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SPLITS = pytest.mark.parametrize("num_splits", [None, 1, 5, 64])


def build(
    model: ModelAttention, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[PagedBatch, AttentionLayer]:
    batch = model.batch(lengths, dtype, DEVICE, SEED, num_padding=3)
    options = model.score_options(dtype, DEVICE, SEED)
    return batch, layer_of(model.shape, model.window, **options)


def exact(batch: PagedBatch, layer: AttentionLayer) -> torch.Tensor:
    """Return what attention has to be, and check that it is not what a layer without the options
    gives."""
    options = {"logit_softcap": layer.logit_softcap, "sinks": layer.sinks}
    expected = dense_attention(batch, layer.window, **options)
    if layer.logit_softcap is not None or layer.sinks is not None:
        assert relative_error(dense_attention(batch, layer.window), expected) > 0.1
    return expected


def check_rows(
    batch: PagedBatch, layer: AttentionLayer, out: torch.Tensor, bound: float | None = None
) -> None:
    """Compare each sequence separately: errors in a short one would be hidden by long ones."""
    expected, bound = exact(batch, layer), bound or bound_of(layer.logit_softcap, out.dtype)
    for rows in token_rows(batch):
        if rows.numel():
            assert relative_error(out[rows], expected[rows]) < bound


@DTYPES
@each(*SCORED, "phi3-mini", "glm4-9b")
def test_mixed_steps(model: ModelAttention, dtype: torch.dtype) -> None:
    batch, layer = build(model, MIXED, dtype)
    batch.store()
    backend = TritonAttention(torch.device(DEVICE))
    out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    check_rows(batch, layer, out)
    padding = out[batch.num_real_tokens :]
    assert torch.equal(padding, torch.zeros_like(padding))


@DTYPES
@each("gemma2-9b sliding", "gpt-oss-20b sliding", "gpt-oss-20b", "phi3-mini")
def test_large_steps(model: ModelAttention, dtype: torch.dtype) -> None:
    batch, layer = build(model, LARGE, dtype)
    batch.store()
    backend = TritonAttention(torch.device(DEVICE))
    check_rows(batch, layer, backend.attend(batch.q, batch.kv_cache, layer, batch.metadata))


@DTYPES
@each(*SCORED)
@SPLITS
def test_decodes(model: ModelAttention, dtype: torch.dtype, num_splits: int | None) -> None:
    batch, layer = build(model, [(1, length) for length in SEQ_LENS], dtype)
    batch.store()
    out = paged_attention(
        batch.q,
        batch.kv_cache,
        batch.metadata,
        scale=layer.scale,
        window=layer.window,
        logit_softcap=layer.logit_softcap,
        sinks=layer.sinks,
        num_splits=num_splits,
        pdl=True,
    )
    check_rows(batch, layer, out)


@ALL
@SPLITS
def test_decodes_that_rotate(model: ModelAttention, num_splits: int | None) -> None:
    step = model.decode(SEQ_LENS, torch.bfloat16, DEVICE, SEED, num_padding=5, num_idle=2)
    step.batch.slot_mapping[-5:] = 0
    check_fused(step, model.window, num_splits=num_splits, pdl=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@each("gemma2-9b sliding", "gpt-oss-20b sliding", "glm4-9b", "phi4-mini")
def test_decodes_that_rotate_in_other_dtypes(model: ModelAttention, dtype: torch.dtype) -> None:
    for num_splits in (1, 5):
        step = model.decode(SEQ_LENS, dtype, DEVICE, SEED, num_padding=5, num_idle=2)
        check_fused(step, model.window, num_splits=num_splits, pdl=True)


def lengths_of(num_seqs: int) -> list[int]:
    """Return lengths of which the first is a long one, and beyond a few all others are short."""
    most = SEQ_LENS[::-1][:num_seqs] if num_seqs <= len(SEQ_LENS) else SEQ_LENS[-1:]
    return (most + SHORT * num_seqs)[:num_seqs]


@ALL
@pytest.mark.parametrize("num_seqs", [1, 64, 256])
def test_the_backend_serves_decodes(model: ModelAttention, num_seqs: int) -> None:
    lengths = lengths_of(num_seqs)
    step = model.decode(lengths, torch.bfloat16, DEVICE, SEED)
    before, given = step.batch.kv_cache.clone(), step.qkv.clone()
    device = torch.device(DEVICE)
    layer = step.layer(TritonOps(device), model.window)
    backend = TritonAttention(device)
    out = backend.rotate_and_attend(step.qkv, step.batch.kv_cache, layer, step.step)
    step.qkv.copy_(given)
    check_output(step, out, model.window)
    check_cache(step, before)


@ALL
@pytest.mark.parametrize("num_seqs", [1, 18, 160])
def test_a_graph_follows_each_steps_inputs(model: ModelAttention, num_seqs: int) -> None:
    lengths = lengths_of(num_seqs)
    first, *steps = (
        model.decode(order, torch.bfloat16, DEVICE, SEED + number, num_padding=2, num_idle=1)
        for number, order in enumerate((lengths, lengths[::-1], lengths, lengths[::-1]))
    )
    most_blocks = max(len(step.batch.kv_cache) for step in (first, *steps))
    shape = (most_blocks, *first.batch.kv_cache.shape[1:])
    device, static = torch.device(DEVICE), first.over(first.batch.kv_cache.new_zeros(shape))
    layer = static.layer(TritonOps(device), model.window)
    backend = TritonAttention(device)

    def attend() -> torch.Tensor:
        # As in a runner, each step has metadata of its own.
        step = replace(static, batch=replace(static.batch)).step
        return backend.rotate_and_attend(static.qkv, static.batch.kv_cache, layer, step)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for step in steps:
        static.copy_from(step)
        out.fill_(float("nan"))
        graph.replay()
        check_output(step, out, model.window)
        before = step.batch.kv_cache
        check_cache(step.over(static.batch.kv_cache[: len(before)]), before)


@each(*SCORED, "phi3-mini", "glm4-9b")
def test_paged_attention_over_fp8(model: ModelAttention) -> None:
    scales = random_scales(model.shape.num_kv_heads, DEVICE, SEED)
    for lengths in (MIXED, LARGE, [(1, length) for length in SEQ_LENS]):
        batch, layer = build(model, lengths, torch.bfloat16)
        check_paged(
            in_fp8(batch, scales), scales, model.window,
            logit_softcap=layer.logit_softcap, sinks=layer.sinks, pdl=True,
        )  # fmt: skip


@ALL
@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_decodes_that_rotate_over_fp8(model: ModelAttention, num_splits: int | None) -> None:
    wide = model.decode(SEQ_LENS, torch.bfloat16, DEVICE, SEED, num_padding=5, num_idle=2)
    wide.batch.slot_mapping[-5:] = 0
    fp8_decode(wide, SEED).check(model.window, num_splits=num_splits, pdl=True)


def prompt_backend(model: ModelAttention, dtype: torch.dtype) -> AttentionBackend:
    device, shape = torch.device(DEVICE), model.shape
    heads = HeadSizes(shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    chosen = choose_attention(choose_backend(device).attention, device, heads, dtype)
    assert isinstance(chosen.backend, PromptAttention)
    return chosen.backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ALL
@torch.inference_mode()
def test_long_prompts(model: ModelAttention, dtype: torch.dtype) -> None:
    """Prompts that the backend computes with cuDNN where it can, over gathered keys, or paged."""
    backend = prompt_backend(model, dtype)
    for lengths in (LONG, LONG[::-1], [(4096, 4096), (1, 300)]):
        batch, layer = build(model, lengths, dtype)
        batch.store()
        check_rows(batch, layer, backend.attend(batch.q, batch.kv_cache, layer, batch.metadata))


@each(*SCORED, "phi3-mini", "glm4-9b")
@torch.inference_mode()
def test_long_prompts_over_fp8(model: ModelAttention) -> None:
    backend = prompt_backend(model, torch.bfloat16)
    scales = random_scales(model.shape.num_kv_heads, DEVICE, SEED)
    batch, layer = build(model, LONG, torch.bfloat16)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    scaled = replace(layer, kv_scales=scales)
    out = backend.attend(batch.q, batch.kv_cache, scaled, batch.metadata)
    # Gathered keys are rounded to bfloat16, which large scores enlarge.
    check_rows(batch, layer, out, 2e-2 if layer.logit_softcap is None else 5e-2)
