"""Kernels of experts on a GPU, at real sizes, in every dtype, against float64."""

from functools import partial

import pytest
import torch

from tests.support.expert_checks import (
    check_loads,
    check_normed_routing,
    check_products,
    check_replay,
    check_routing,
    check_unusual_scores,
    draw_matrices,
    draw_routed,
    quantized,
    with_biases,
)
from worker_daemon.contracts.experts import ExpertMatrices, RoutedTokens, Routing
from worker_daemon.kernels.expert_tiles import ExpertTiles, ProductTile
from worker_daemon.kernels.experts import TritonExperts, multiply_rows
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.ops import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
QWEN3_30B = (128, 8, 2048, 768)
"""Experts, experts of a token, hidden size, inner size."""
GPT_OSS_20B = (32, 4, 2880, 2880)
GPT_OSS_20B_OF_4 = (32, 4, 2880, 720)
"""The part of one of four ranks."""
SHAPES = [QWEN3_30B, (8, 2, 1024, 3584), (60, 4, 512, 352), (3, 1, 72, 40)]
TILES = {
    "left": ExpertTiles(16, ProductTile(64, 64, 4, 4), ProductTile(64, 128, 4, 4), True),
    "left_small": ExpertTiles(32, ProductTile(16, 128, 4, 3), ProductTile(32, 64, 4, 5), True),
    "right": ExpertTiles(128, ProductTile(64, 64, 8, 4), ProductTile(128, 64, 8, 4), False),
    "right_large": ExpertTiles(128, ProductTile(128, 64, 8, 4), ProductTile(256, 64, 8, 4), False),
    "right_small": ExpertTiles(32, ProductTile(32, 64, 4, 3), ProductTile(64, 32, 4, 3), False),
}


@pytest.fixture(scope="module")
def ops() -> TritonExperts:
    return TritonExperts(torch.device("cuda"))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 128), (64, 128), (513, 60), (8192, 128), (7, 8)], ids=str)
@pytest.mark.parametrize(
    "routing", [Routing(1, False, True), Routing(8, True, False), Routing(4, True, True)], ids=str
)
def test_routing(
    ops: TritonExperts, dtype: torch.dtype, shape: tuple[int, int], routing: Routing
) -> None:
    check_routing(ops, dtype, "cuda", shape, routing, num_tokens=max(1, shape[0] - 3))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 128), (513, 60), (8192, 128)], ids=str)
def test_replayed_experts(ops: TritonExperts, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_replay(ops, dtype, "cuda", shape, Routing(8, True, False), max(1, shape[0] - 3))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 128), (64, 128), (513, 60), (8192, 128), (7, 8)], ids=str)
@pytest.mark.parametrize("top_k", [1, 8])
def test_loads(ops: TritonExperts, dtype: torch.dtype, shape: tuple[int, int], top_k: int) -> None:
    for num_tokens in {max(0, shape[0] - 3), shape[0]}:
        check_loads(ops, dtype, "cuda", shape, Routing(top_k, True, True), num_tokens)


@DTYPES
@pytest.mark.parametrize("has_part", [False, True])
@pytest.mark.parametrize("shape", [(2048, 128), (2880, 32), (512, 60)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_routing_of_a_norm(
    dtype: torch.dtype, num_tokens: int, shape: tuple[int, int], has_part: bool
) -> None:
    layer_ops = TritonOps(torch.device("cuda"))
    hidden, num_experts = shape
    sizes = {"hidden": hidden, "num_experts": num_experts}
    for has_bias in (False, True):
        check_normed_routing(
            layer_ops, dtype, "cuda", num_tokens, **sizes, has_bias=has_bias, has_part=has_part
        )


@pytest.mark.parametrize("num_experts", [4, 60, 128])
def test_scores_that_are_not_finite(ops: TritonExperts, num_experts: int) -> None:
    check_unusual_scores(ops, "cuda", num_experts)


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 61, 300, 1500])
def test_chosen_tiles(
    ops: TritonExperts, dtype: torch.dtype, shape: tuple[int, int, int, int], num_tokens: int
) -> None:
    num_experts, top_k, hidden, inner = shape
    x = torch.randn(num_tokens + 3, hidden, device="cuda").to(dtype)
    matrices = draw_matrices(num_experts, hidden, inner, dtype, "cuda")
    for num_padding in (0, 3):
        routed = draw_routed(num_tokens, top_k, num_experts, "cuda", num_padding)
        check_products(ops.multiply, x[: num_tokens + num_padding], routed, matrices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [2, 64, 700])
def test_every_form_of_tile(
    tiles: ExpertTiles, dtype: torch.dtype, shape: tuple[int, int, int, int], num_tokens: int
) -> None:
    num_experts, top_k, hidden, inner = shape
    x = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    matrices = draw_matrices(num_experts, hidden, inner, dtype, "cuda")
    pdl = has_dependent_launch(torch.device("cuda"))
    routed = draw_routed(num_tokens, top_k, num_experts, "cuda")
    check_products(partial(multiply_rows, tiles=tiles, pdl=pdl), x, routed, matrices)


@DTYPES
@pytest.mark.parametrize("shape", [GPT_OSS_20B, GPT_OSS_20B_OF_4, (3, 1, 72, 40)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 61, 300, 1500])
def test_biases_and_clamped_activations(
    ops: TritonExperts, dtype: torch.dtype, shape: tuple[int, int, int, int], num_tokens: int
) -> None:
    """The last expert is another rank's."""
    num_experts, top_k, hidden, inner = shape
    x = torch.randn(num_tokens + 3, hidden, device="cuda").to(dtype)
    matrices = with_biases(draw_matrices(num_experts - 1, hidden, inner, dtype, "cuda"))
    matrices = matrices._replace(num_experts=num_experts)
    for num_padding, down in ((0, True), (3, False)):
        routed = draw_routed(num_tokens, top_k, num_experts, "cuda", num_padding)
        given = matrices if down else matrices._replace(down_bias=None)
        check_products(ops.multiply, x[: num_tokens + num_padding], routed, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("num_tokens", [2, 700])
def test_biases_in_every_form_of_tile(
    tiles: ExpertTiles, dtype: torch.dtype, num_tokens: int
) -> None:
    num_experts, top_k, hidden, inner = GPT_OSS_20B_OF_4
    x = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    matrices = with_biases(draw_matrices(num_experts, hidden, inner, dtype, "cuda"))
    pdl = has_dependent_launch(torch.device("cuda"))
    routed = draw_routed(num_tokens, top_k, num_experts, "cuda")
    check_products(partial(multiply_rows, tiles=tiles, pdl=pdl), x, routed, matrices)


@pytest.mark.parametrize("num_tokens", [1, 2, 50, 1500])
def test_biases_of_weights_in_fp8(ops: TritonExperts, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner = GPT_OSS_20B
    x = torch.randn(num_tokens, hidden, device="cuda").half()
    matrices = draw_matrices(num_experts, hidden, inner, torch.float16, "cuda")
    matrices = with_biases(quantized(matrices, "row"))
    check_products(ops.multiply, x, draw_routed(num_tokens, top_k, num_experts, "cuda"), matrices)


@pytest.mark.parametrize("num_tokens", [1, 5, 400])
def test_a_nan_passes_the_clamped_activation(ops: TritonExperts, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 128, device="cuda").bfloat16()
    matrices = with_biases(draw_matrices(4, 128, 128, torch.bfloat16, "cuda"))
    matrices.gate_up_bias[:, 3] = torch.nan
    assert ops.multiply(x, draw_routed(num_tokens, 2, 4, "cuda"), matrices).isnan().all()


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 2000])
def test_all_rows_to_the_same_experts(ops: TritonExperts, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner = QWEN3_30B
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    matrices = draw_matrices(num_experts, hidden, inner, torch.bfloat16, "cuda")
    one = draw_routed(1, top_k, num_experts, "cuda")
    routed = RoutedTokens(*(part.expand(num_tokens, -1).contiguous() for part in one))
    unused = [e for e in range(num_experts) if e not in set(one.experts[0].tolist())]
    matrices.gate_up[unused] = torch.nan
    check_products(ops.multiply, x, routed, matrices)


@pytest.mark.parametrize("num_tokens", [1, 40, 1200])
def test_ranks_with_parts_of_the_experts_add_up(ops: TritonExperts, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner = QWEN3_30B
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    matrices = draw_matrices(num_experts, hidden, inner, torch.bfloat16, "cuda")
    routed = draw_routed(num_tokens, top_k, num_experts, "cuda")
    parts = []
    for rows in (slice(0, 43), slice(43, 86), slice(86, 128)):
        part = ExpertMatrices(matrices.gate_up[rows], matrices.down[rows], rows.start)
        check_products(ops.multiply, x, routed, part)
        parts.append(ops.multiply(x, routed, part).float())
    whole = ops.multiply(x, routed, matrices).float()
    assert (sum(parts) - whole).norm() / whole.norm() < 1e-2


@pytest.mark.parametrize("num_tokens", [1, 16, 600])
def test_a_graph_follows_each_steps_routing(ops: TritonExperts, num_tokens: int) -> None:
    num_experts, top_k, hidden, inner = QWEN3_30B
    matrices = draw_matrices(num_experts, hidden, inner, torch.bfloat16, "cuda")
    x = torch.randn(num_tokens, hidden, device="cuda").bfloat16()
    scores = torch.randn(num_tokens, num_experts, device="cuda").bfloat16()
    starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    routing = Routing(top_k, True, True)
    loads = torch.zeros(num_experts, dtype=torch.int64, device="cuda")

    def run() -> torch.Tensor:
        return ops.multiply(x, ops.route(scores, routing, starts, loads), matrices)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for num_used in (num_tokens, max(1, num_tokens // 2), num_tokens):
        x.copy_(torch.randn_like(x))
        scores.copy_(torch.randn_like(scores))
        starts[1] = num_used
        y.fill_(torch.nan)
        loads.zero_()
        graph.replay()
        chosen = ops.route(scores, routing, starts).experts[:num_used]
        assert torch.equal(loads, torch.bincount(chosen.flatten(), minlength=num_experts))
        assert torch.equal(y, run())
        assert (y[num_used:] == 0).all()
        assert y[:num_used].isfinite().all()


@pytest.mark.parametrize("form", ["row", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [QWEN3_30B, (8, 2, 1024, 3584)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, 50, 1500])
def test_weights_in_fp8(
    ops: TritonExperts,
    form: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int, int],
    num_tokens: int,
) -> None:
    num_experts, top_k, hidden, inner = shape
    x = torch.randn(num_tokens, hidden, device="cuda").to(dtype)
    matrices = quantized(draw_matrices(num_experts, hidden, inner, dtype, "cuda"), form)
    routed = draw_routed(num_tokens, top_k, num_experts, "cuda")
    check_products(ops.multiply, x, routed, matrices)
