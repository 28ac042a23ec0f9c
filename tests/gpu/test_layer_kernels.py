"""The layer kernels on a GPU at real sizes, in every dtype, against torch in fp64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import pytest
import torch

from benchmarks.layer_reference import EPS, Heads, make_projected, make_rows, rotated
from benchmarks.paged_reference import relative_error
from tests.support.layer_checks import (
    BOUNDS,
    check_activation,
    check_norms,
    check_products,
    check_projection,
    check_span_norms,
    generator,
    run_projection,
)
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.layer_ops import (
    Activation,
    Epilogue,
    LayerOps,
    Norm,
    NormedSum,
    SpanNorms,
)
from worker_daemon.layers.rotary import LongRope, rotary_table
from worker_daemon.layers.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
OFFSETS = pytest.mark.parametrize("weight_offset", [0.0, 1.0])
LLAMA_8B = Heads(32, 8, 128)
QWEN_600M = Heads(16, 8, 128, is_normed=True)


@pytest.fixture(scope="module")
def ops() -> LayerOps:
    ops = choose_backend(torch.device(DEVICE)).make_ops()
    assert ops.name == "triton"
    return ops


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(1, 1024), (1, 4096), (64, 4096), (257, 5120), (3, 16384), (8192, 1024), (5000, 72)],
)
@OFFSETS
def test_norms(
    ops: LayerOps, dtype: torch.dtype, num_rows: int, size: int, weight_offset: float
) -> None:
    seed = num_rows + size
    check_norms(ops, DEVICE, dtype, num_rows, size, seed, weight_offset=weight_offset)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "num_ranks"),
    [((32, 32, 128), 1), ((40, 8, 128), 1), ((40, 8, 128), 8), ((32, 4, 128), 8), ((7, 1, 80), 1)],
)
def test_span_norms(
    ops: LayerOps, dtype: torch.dtype, heads: tuple[int, int, int], num_ranks: int
) -> None:
    check_span_norms(ops, DEVICE, dtype, heads, num_ranks, seed=heads[0] + num_ranks)


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "size"), [(1, 14336), (64, 3072), (8192, 3072), (70000, 24), (333, 11008)]
)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activation(
    ops: LayerOps, dtype: torch.dtype, num_rows: int, size: int, activation: Activation
) -> None:
    check_activation(ops, activation, DEVICE, dtype, num_rows, size, seed=num_rows + size)


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [
        (1, 4096, 28672), (1, 1024, 6144), (1, 4096, 6144), (1, 5120, 27648), (1, 8192, 1000),
        (7, 4096, 6144), (200, 1024, 6144), (1, 1096, 1000),
        (1, 3584, 28672), (64, 3584, 8192),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("activation", "weight_offset"), [("silu", 0.0), ("gelu_tanh", 1.0)])
def test_products(
    ops: LayerOps,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    activation: Activation,
    weight_offset: float,
) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]
    seed = num_rows + num_inputs
    check_products(
        ops, DEVICE, dtype, num_rows, num_inputs, num_outputs, seed,
        bound=bound, activation=activation, weight_offset=weight_offset,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 8, 256, 8192])
@pytest.mark.parametrize("heads", [LLAMA_8B, QWEN_600M], ids=str)
def test_projection(ops: LayerOps, dtype: torch.dtype, num_tokens: int, heads: Heads) -> None:
    check_projection(ops, DEVICE, dtype, heads, num_tokens, seed=num_tokens)


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 96, 256])
def test_head_dims(ops: LayerOps, dtype: torch.dtype, is_normed: bool, head_dim: int) -> None:
    for num_q_heads, num_kv_heads in ((14, 2), (5, 5), (64, 1)):
        heads = Heads(num_q_heads, num_kv_heads, head_dim, is_normed, block_size=8)
        check_projection(ops, DEVICE, dtype, heads, 77, seed=head_dim, integers=torch.int32)


GLM4_9B = Heads(32, 2, 128, rotary_dim=64, interleaved=True)
PHI4_MINI = Heads(24, 8, 128, rotary_dim=96)
PHI3_MINI = Heads(32, 32, 96)
OTHERS = [
    GLM4_9B, PHI4_MINI, PHI3_MINI, Heads(14, 2, 80, is_normed=True, rotary_dim=32),
    Heads(8, 1, 64, is_normed=True, interleaved=True),
    Heads(5, 5, 24, rotary_dim=2, interleaved=True, block_size=8),
]  # fmt: skip


@DTYPES
@pytest.mark.parametrize("num_tokens", [1, 77, 8192])
@pytest.mark.parametrize("heads", OTHERS, ids=str)
def test_other_rotations(ops: LayerOps, dtype: torch.dtype, num_tokens: int, heads: Heads) -> None:
    check_projection(ops, DEVICE, dtype, heads, num_tokens, seed=num_tokens)


@DTYPES
@pytest.mark.parametrize("max_model_len", [4096, 32768])
def test_tables_of_longrope(ops: LayerOps, dtype: torch.dtype, max_model_len: int) -> None:
    """LongRoPE tables of Phi-4-mini, whose factors depend on the longest context. The device
    computes them as the CPU does, whose tables are compared with transformers elsewhere."""
    factors = torch.rand(2, 48, generator=generator("cpu", max_model_len)) * 40 + 1
    rope = LongRope(96, 1e4, *(tuple(each.tolist()) for each in factors), 32.0, 4096)
    table = rotary_table(rope, max_model_len, torch.device(DEVICE))
    exact = rotary_table(rope, max_model_len, torch.device("cpu"))
    assert torch.allclose(table.cpu(), exact, atol=1e-5)
    check_projection(ops, DEVICE, dtype, PHI4_MINI, 300, seed=max_model_len, rotary_table=table)


@DTYPES
@pytest.mark.parametrize("head_dim", [128, 256])
def test_norms_of_heads_with_an_offset(ops: LayerOps, dtype: torch.dtype, head_dim: int) -> None:
    heads = Heads(8, 4, head_dim, is_normed=True)
    check_projection(ops, DEVICE, dtype, heads, 77, seed=head_dim, weight_offset=1.0)


def test_without_a_cache_only_the_queries_are_made(ops: LayerOps) -> None:
    step = make_projected(QWEN_600M, 50, torch.bfloat16, generator(DEVICE, 3))
    expected = rotated(step)[0]
    out = run_projection(ops, step, step.kv_cache.new_empty(0))
    assert relative_error(out, expected) < BOUNDS[torch.bfloat16]


@pytest.mark.whole_gpu
def test_the_cache_may_exceed_two_gibielements(ops: LayerOps) -> None:
    heads = Heads(8, 8, 128)
    step = make_projected(heads, 20, torch.bfloat16, generator(DEVICE, 1))
    num_blocks = 2**31 // (2 * 16 * 8 * 128) + 10
    cache = torch.zeros(num_blocks, 2, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    step.slot_mapping.copy_(torch.arange(20) + num_blocks * 16 - 40)
    q, k, v = rotated(step)
    assert relative_error(run_projection(ops, step, cache), q) < BOUNDS[torch.bfloat16]
    block, offset = step.slot_mapping // 16, step.slot_mapping % 16
    assert relative_error(cache[block, 0, offset], k) < BOUNDS[torch.bfloat16]
    assert torch.equal(cache[block, 1, offset], v)
    assert int(cache.count_nonzero(dim=(1, 2, 3, 4)).count_nonzero()) == 2


def test_a_row_does_not_depend_on_its_neighbours(ops: LayerOps) -> None:
    x = make_rows(300, 4096, torch.bfloat16, generator(DEVICE, 2))
    norm = Norm(torch.ones(4096, dtype=torch.bfloat16, device=DEVICE), EPS)
    together = ops.rms_norm(x, norm)
    alone = torch.cat([ops.rms_norm(row.unsqueeze(0), norm) for row in x])
    assert torch.equal(together, alone)


@dataclass(frozen=True)
class Model:
    """The options of the layers of a chain."""

    heads: Heads
    has_part_norm: bool = False
    weight_offset: float = 0.0
    """The constant added to the weights of all norms."""
    activation: Activation = "silu"
    spans_heads: bool = False
    """A norm over all queries, and one over all keys."""


LLAMA = Model(LLAMA_8B)
MODELS = {
    "llama": LLAMA,
    "llama with norms of parts": replace(LLAMA, has_part_norm=True),
    "gemma": Model(Heads(16, 8, 256, is_normed=True), True, 1.0, "gelu_tanh"),
    "glm4": Model(GLM4_9B, has_part_norm=True),
    "phi4-mini": Model(PHI4_MINI),
    "olmo2": Model(Heads(32, 32, 128), has_part_norm=True, spans_heads=True),
}
SIZE, INNER = 4096, 14336


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("num_tokens", [1, 37, 512])
def test_a_chain_in_a_cuda_graph_gives_the_same_bits_every_time(
    ops: LayerOps, num_tokens: int, model: Model
) -> None:
    """Each kernel reads what the one before wrote, which may still run: a missing wait shows."""
    chain = make_chain(model, num_tokens)
    first = chain(ops)
    assert relative_error(first, chain(TorchOps())) < 2e-2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(ops)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


def make_chain(model: Model, num_tokens: int) -> Callable[[LayerOps], torch.Tensor]:
    """Return a function that computes six layers without attention by given operations."""
    heads, offset = model.heads, model.weight_offset
    random = generator(DEVICE, num_tokens)
    # The queries are the attention's output here, so norms keep their size.
    step = make_projected(heads, num_tokens, torch.bfloat16, random, weight_offset=offset)
    head_norms = step.head_norms
    if head_norms is not None:
        head_norms.weight.fill_(1.0 - offset)
    hidden = make_rows(num_tokens, SIZE, torch.bfloat16, random)
    norm = Norm(make_rows(1, SIZE, torch.bfloat16, random)[0], EPS, offset)
    part_norm = norm if model.has_part_norm else None
    query_size = heads.num_q_heads * heads.head_dim
    spans = None
    if model.spans_heads:
        num_normed = query_size + heads.num_kv_heads * heads.head_dim
        weight = torch.rand(num_normed, generator=random, device=DEVICE) + 0.5
        spans = SpanNorms(weight.bfloat16(), EPS, query_size)
    shapes = ((heads.width, SIZE), (SIZE, query_size), (2 * INNER, SIZE), (SIZE, INNER))
    projections = [
        (torch.randn(shape, generator=random, device=DEVICE) / shape[1] ** 0.5).bfloat16()
        for shape in shapes
    ]

    def chain(using: LayerOps) -> torch.Tensor:
        delta, residual = hidden, hidden
        for _ in range(6):
            source = NormedSum(delta, residual, norm, part_norm)
            qkv, residual = using.product(source, projections[0], Epilogue())
            assert isinstance(qkv, torch.Tensor)
            if spans is not None:
                qkv = using.norm_spans(qkv, spans)
            q = using.rotate_and_store(
                qkv,
                step.positions,
                step.rotary_table,
                heads.num_kv_heads,
                heads.head_dim,
                head_norms,
                step.kv_cache,
                step.slot_mapping,
                interleaved=heads.interleaved,
            )
            delta, _ = using.product(q.flatten(1), projections[1], Epilogue())
            assert isinstance(delta, torch.Tensor)
            source = NormedSum(delta, residual, norm, part_norm)
            gated = Epilogue(activation=model.activation)
            inner_rows, residual = using.product(source, projections[2], gated)
            delta, _ = using.product(inner_rows, projections[3], Epilogue())
            assert isinstance(delta, torch.Tensor)
        return residual + delta

    return chain
