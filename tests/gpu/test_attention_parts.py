"""Log-sum-exps of every attention kernel on a GPU, and merges of attention over parts of the keys,
at real sizes, against a dense fp64 softmax and torch's flash attention."""

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
from tests.support.attention_steps import layer_of
from tests.support.fp8_caches import in_fp8, random_scales, store
from tests.support.model_attention import MODEL_ATTENTION, SCORED, ModelAttention
from tests.support.rotated_decodes import bound_of
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionBackend, AttentionLayer
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import choose_attention
from worker_daemon.layers.prompt_attention import PromptAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = random.randrange(1 << 30)
CUDA = torch.device("cuda")
BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
LSE_BOUND = 1e-3
"""Scores are sums in float32, of exact products."""
LLAMA_8B = ModelAttention(Shape(32, 8, 128))
MIXED = [(1, 1500), (1, 3), (700, 700), (1, 257), (512, 2000), (0, 40), (33, 1000), (5, 5)]
DECODES = [(1, length) for length in (1, 15, 16, 17, 64, 65, 500, 2047, 2048, 4000)]
LONG = [
    (1, 1500), (1, 3), (1024, 1024), (512, 5000), (0, 40), (1950, 1950), (33, 1000), (1100, 6000),
]  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
MODELS = pytest.mark.parametrize(
    "model",
    [LLAMA_8B, *(MODEL_ATTENTION[name] for name in (*SCORED, "phi3-mini"))],
    ids=["llama-8b", *SCORED, "phi3-mini"],
)


def build(
    model: ModelAttention, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[PagedBatch, AttentionLayer]:
    """Return a batch that is stored, and its layer."""
    batch = model.batch(lengths, dtype, "cuda", SEED, num_padding=3)
    batch.store()
    options = model.score_options(dtype, "cuda", SEED)
    return batch, layer_of(model.shape, model.window, **options)


def exact(batch: PagedBatch, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"logit_softcap": layer.logit_softcap, "sinks": layer.sinks}
    return dense_with_lse(batch, layer.window, **options)


def prompt_backend(shape: Shape) -> AttentionBackend:
    heads = HeadSizes(shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    chosen = choose_attention(choose_backend(CUDA).attention, CUDA, heads, torch.bfloat16)
    assert isinstance(chosen.backend, PromptAttention)
    return chosen.backend


@DTYPES
@MODELS
@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_steps(model: ModelAttention, lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    batch, layer = build(model, lengths, dtype)
    out, lse = attend_with_lse(TritonAttention(CUDA), batch, layer)
    bound = max(BOUNDS[dtype], bound_of(layer.logit_softcap, dtype))
    check_attended(out, lse, exact(batch, layer), bound, LSE_BOUND)


@DTYPES
@MODELS
@pytest.mark.parametrize("num_splits", [1, 5, 64])
def test_split_decodes(model: ModelAttention, num_splits: int, dtype: torch.dtype) -> None:
    batch, layer = build(model, DECODES, dtype)
    lse = torch.full(batch.q.shape[:2], torch.nan, device="cuda")
    out = paged_attention(
        batch.q, batch.kv_cache, batch.metadata, scale=layer.scale, window=layer.window,
        logit_softcap=layer.logit_softcap, sinks=layer.sinks, lse=lse, num_splits=num_splits,
        pdl=True,
    )  # fmt: skip
    bound = max(BOUNDS[dtype], bound_of(layer.logit_softcap, dtype))
    check_attended(out, lse, exact(batch, layer), bound, LSE_BOUND)


@MODELS
@torch.inference_mode()
def test_long_prompts(model: ModelAttention) -> None:
    """Over gathered keys, also where cuDNN computes them without log-sum-exps."""
    backend = prompt_backend(model.shape)
    for lengths in (LONG, [(4096, 4096), (1, 300)]):
        batch, layer = build(model, lengths, torch.bfloat16)
        out, lse = attend_with_lse(backend, batch, layer)
        bound = max(BOUNDS[torch.bfloat16], bound_of(layer.logit_softcap, torch.bfloat16))
        check_attended(out, lse, exact(batch, layer), bound, LSE_BOUND)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [700, 2048])
@torch.inference_mode()
def test_log_sum_exps_are_those_of_flash_attention(length: int, dtype: torch.dtype) -> None:
    shape = LLAMA_8B.shape
    batch = make_batch(shape, [(length, length)], dtype=dtype, device="cuda", seed=SEED)
    batch.store()
    group = shape.num_q_heads // shape.num_kv_heads
    keys, values = batch.history[0].repeat_interleave(group, dim=2)
    heads = (rows.transpose(0, 1).unsqueeze(0) for rows in (batch.q, keys, values))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    wanted, sums = flash(*heads, is_causal=True, scale=shape.scale)[:2]
    expected = wanted[0].transpose(0, 1), sums[0, :, :length].t()
    out, lse = attend_with_lse(prompt_backend(shape), batch, layer_of(shape))
    check_attended(out, lse, expected, 2 * BOUNDS[dtype], LSE_BOUND)


@MODELS
@torch.inference_mode()
def test_over_fp8(model: ModelAttention) -> None:
    """Gathered keys are rounded to bfloat16, which large scores enlarge."""
    scales = random_scales(model.shape.num_kv_heads, "cuda", SEED)
    backend, is_capped = prompt_backend(model.shape), model.logit_softcap is not None
    for lengths, bound in ((MIXED, 2e-2), (DECODES, 2e-2), (LONG, 5e-2 if is_capped else 2e-2)):
        batch, layer = build(model, lengths, torch.bfloat16)
        batch = in_fp8(batch, scales)
        store(batch, scales)
        out, lse = attend_with_lse(backend, batch, replace(layer, kv_scales=scales))
        lse_bound = 0.5 if lengths is LONG and is_capped else 2e-2
        check_attended(out, lse, exact(batch, layer), bound, lse_bound)


@MODELS
@pytest.mark.parametrize("num_seqs", [1, 10, 160])
def test_decodes_that_rotate(model: ModelAttention, num_seqs: int) -> None:
    seq_lens = [160, 2048, 33, 1, 65, 500, 17, 4000, 2, 64] * 16
    step = model.decode(seq_lens[:num_seqs], torch.float16, "cuda", SEED, num_padding=3, num_idle=2)
    step.batch.slot_mapping[-3:] = 0
    copy = step.on_copies()
    # Torch computes the same in another order, from queries and keys that it rounds alike.
    torch_layer = copy.layer(TorchOps(), model.window)
    expected = rotate_with_lse(TorchPagedAttention(), copy, torch_layer)
    backend, layer = TritonAttention(CUDA), step.layer(TritonOps(CUDA), model.window)
    bound = 1e-2 if model.logit_softcap is None else 5e-2
    check_attended(*rotate_with_lse(backend, step, layer), expected, bound, 2 * bound)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("first", [16, 480, 1024])
@torch.inference_mode()
def test_sequences_with_fewer_keys_than_queries(first: int, window: int | None) -> None:
    """By the paged kernels; a long prompt that has all of its keys is gathered."""
    lengths = [(700, 700), (1, 300), (1500, 1500), (40, 1040), (1030, 2200)]
    batch, layer = build(LLAMA_8B.with_window(window), lengths, torch.bfloat16)
    part = keys_from(batch, first)
    expected = attend_with_lse(TorchPagedAttention(), batch, layer, part)
    for backend in (TritonAttention(CUDA), prompt_backend(batch.shape)):
        out, lse = attend_with_lse(backend, batch, layer, part)
        check_attended(out, lse, expected, 2 * BOUNDS[torch.bfloat16], LSE_BOUND)


@DTYPES
@pytest.mark.parametrize("name", ["llama-8b", "gemma2-9b", "gpt-oss-20b"])
@pytest.mark.parametrize("count", [1, 4])
def test_merged_parts_are_the_whole(name: str, count: int, dtype: torch.dtype) -> None:
    model = {**MODEL_ATTENTION, "llama-8b": LLAMA_8B}[name]
    batch, layer = build(model, [(33, 1500), (1, 900), (0, 9), (1, 1), (70, 70), (1, 64)], dtype)
    borders = random_borders(batch, count, random.Random(SEED))
    print(SEED, borders)
    bound = max(BOUNDS[dtype], bound_of(layer.logit_softcap, dtype))
    # Parts and merges are rounded too.
    check_parts(TritonAttention(CUDA), batch, layer, borders, 4 * bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_merges(dtype: torch.dtype) -> None:
    check_merge(TritonAttention(CUDA), dtype, "cuda", BOUNDS[dtype])


@pytest.mark.parametrize("num_parts", [2, 8])
def test_a_merge_of_a_large_step(num_parts: int) -> None:
    random_rows = torch.Generator("cuda").manual_seed(SEED)
    shape = (num_parts, 8192, 32, 128)
    outs = torch.randn(shape, generator=random_rows, device="cuda", dtype=torch.bfloat16)
    lses = torch.randn(shape[:3], generator=random_rows, device="cuda") * 3
    lses[:, ::7] = -torch.inf
    expected = TorchPagedAttention().merge(outs, lses)
    out, lse = TritonAttention(CUDA).merge(outs, lses)
    check_attended(out, lse, expected, BOUNDS[torch.bfloat16], 1e-5)


def test_a_graph_of_parts_and_their_merge_gives_the_same_bits_every_time() -> None:
    """Each kernel reads what the one before wrote, which may still run: a missing wait shows."""
    batch, layer = build(LLAMA_8B, DECODES, torch.bfloat16)
    backend, half = TritonAttention(CUDA), keys_from(batch, 496)
    outs = torch.empty((2, *batch.q.shape), dtype=torch.bfloat16, device="cuda")
    lses = torch.empty(outs.shape[:3], device="cuda")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        for part, metadata in enumerate((batch.metadata, half)):
            outs[part] = backend.attend(batch.q, batch.kv_cache, layer, metadata, lses[part])
        return backend.merge(outs, lses)

    first = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for _ in range(50):
        for result in (outs, lses, out, lse):
            result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
