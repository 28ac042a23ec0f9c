"""Kernels of experts under Triton's interpreter against float64; conftest.py runs it.

The interpreter multiplies bf16 tiles wrongly, so products run in fp16 and fp32 here and in bf16 in
tests/gpu/test_expert_kernels.py.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.exhaustive import exhaustively
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
from worker_daemon.contracts.experts import (
    ClampedSwiGLU,
    ExpertMatrices,
    RoutedTokens,
    Routing,
)
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.kernels.expert_routing import max_tiles, plan_tiles
from worker_daemon.kernels.expert_tiles import ExpertTiles, ProductTile, RowTile
from worker_daemon.kernels.experts import TritonExperts, multiply_row, multiply_rows
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.layers.experts import ExpertsBlock, ExpertsSpec, SharedExpertSpec
from worker_daemon.layers.norm import NormSpec
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_experts import TorchExperts
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.weights import load_dummy_weights

pytestmark = pytest.mark.each_value  # make test-all runs every combination

OPS = TritonExperts(torch.device("cpu"))
LAYER_OPS = TritonOps(torch.device("cpu"))
PRODUCT = ProductTile(block_o=16, block_i=16, num_warps=4, num_stages=2)
WIDE = ProductTile(block_o=32, block_i=32, num_warps=4, num_stages=2)
TILES = {
    "left": ExpertTiles(16, PRODUCT, WIDE, weights_left=True),
    "right": ExpertTiles(32, WIDE, PRODUCT, weights_left=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (6, 60), (3, 128)], ids=str)
@pytest.mark.parametrize("routing", [
    Routing(1, False, True), Routing(4, True, False), Routing(8, True, True)
], ids=str)  # fmt: skip
def test_routing(dtype: torch.dtype, shape: tuple[int, int], routing: Routing) -> None:
    if dtype == torch.bfloat16:  # the interpreter cuts bits off where a GPU rounds
        routing = replace(routing, rounds_weights=False)
    check_routing(OPS, dtype, "cpu", shape, routing, num_tokens=max(1, shape[0] - 1))


@pytest.mark.parametrize("routing", [Routing(2, True, False), Routing(3, False, True)])
def test_replayed_experts(routing: Routing) -> None:
    for ops in (OPS, TorchExperts()):
        for dtype in (torch.float32, torch.bfloat16):
            check_replay(ops, dtype, "cpu", (9, 7), routing, num_tokens=7)


def test_many_rows_are_routed_alike() -> None:
    check_routing(OPS, torch.float32, "cpu", (515, 6), Routing(2, True, False), 514)


@pytest.mark.parametrize(("shape", "num_tokens"), [
    ((1, 8), 1), ((1, 8), 0), ((6, 60), 4), ((3, 128), 3), exhaustively((515, 6), 514)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("top_k", [1, 4, 6])
def test_loads(shape: tuple[int, int], num_tokens: int, top_k: int) -> None:
    for ops in (OPS, TorchExperts()):
        check_loads(ops, torch.float16, "cpu", shape, Routing(top_k, True, False), num_tokens)


@pytest.mark.parametrize("has_part", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("hidden", "num_experts"), [(64, 8), (40, 5)])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_routing_of_a_norm(
    num_tokens: int, hidden: int, num_experts: int, has_bias: bool, has_part: bool
) -> None:
    sizes = {"hidden": hidden, "num_experts": num_experts}
    for ops in (LAYER_OPS, TorchOps()):
        check_normed_routing(
            ops, torch.float32, "cpu", num_tokens, **sizes, has_bias=has_bias, has_part=has_part
        )


@pytest.mark.parametrize("num_experts", [3, 8, 20])
def test_scores_that_are_not_finite(num_experts: int) -> None:
    check_unusual_scores(OPS, "cpu", num_experts)


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize(("num_tokens", "num_padding"), [(1, 0), (5, 2), (64, 0), (190, 9)])
@pytest.mark.parametrize(("first", "count"), [(0, 8), (3, 2)])
def test_plans_hold_each_row_once(
    block_m: int, num_tokens: int, num_padding: int, first: int, count: int
) -> None:
    experts, _ = draw_routed(num_tokens, 3, 8, "cpu", num_padding)
    plan = plan_tiles(experts, first, count, block_m, pdl=False)
    owners, sizes = plan.entries[: 2 * plan.num_tiles].view(2, -1).tolist()
    rows = plan.entries[2 * plan.num_tiles :].view(-1, block_m).tolist()
    found = {expert: [] for expert in range(count)}
    used = 0
    for owner, size, row in zip(owners, sizes, rows, strict=True):
        if owner >= 0:
            assert 0 < size <= block_m
            found[owner] += row[:size]
            used += 1
    flat = experts.flatten()
    for expert, pairs in found.items():
        assert pairs == torch.where(flat == first + expert)[0].tolist()
    needed = sum(-(-len(pairs) // block_m) for pairs in found.values())
    assert used == needed <= max_tiles(num_tokens + num_padding, 3, count, block_m)
    assert [owner >= 0 for owner in owners] == [index < used for index in range(len(owners))]


def test_more_experts_than_a_tile_of_counts_holds() -> None:
    experts, _ = draw_routed(40, 2, 600, "cpu")
    plan = plan_tiles(experts, 0, 600, 16, pdl=False)
    owners = plan.entries[: plan.num_tiles]
    assert owners[owners >= 0].tolist() == sorted(set(experts.flatten().tolist()))


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        (torch.float16, TILES["left"]),
        (torch.float16, TILES["right"]),
        (torch.float32, TILES["right"]),
    ],
)
@pytest.mark.parametrize(("hidden", "inner"), [(32, 64), (40, 24)])
@pytest.mark.parametrize(("num_tokens", "num_padding"), [(7, 3), (70, 0)])
def test_products(
    dtype: torch.dtype,
    tiles: ExpertTiles,
    hidden: int,
    inner: int,
    num_tokens: int,
    num_padding: int,
) -> None:
    x = torch.randn(num_tokens + num_padding, hidden).to(dtype)
    routed = draw_routed(num_tokens, 2, 5, "cpu", num_padding)
    matrices = draw_matrices(5, hidden, inner, dtype, "cpu")
    check_products(partial(multiply_rows, tiles=tiles, pdl=False), x, routed, matrices)


def test_tiles_that_are_at_most_half_full() -> None:
    """One of two experts fills a tile and a part of the next, the other half a tile."""
    experts = torch.zeros(200, 1, dtype=torch.int32)
    experts[100:164] = 1
    routed = RoutedTokens(experts, torch.rand(200, 1))
    tiles = ExpertTiles(128, WIDE, WIDE, weights_left=False)
    multiply = partial(multiply_rows, tiles=tiles, pdl=False)
    x, matrices = torch.randn(200, 64).half(), draw_matrices(2, 64, 32, torch.float16, "cpu")
    check_products(multiply, x, routed, matrices)


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
@pytest.mark.parametrize("num_tokens", [16, 17, 40])
def test_all_rows_to_one_expert(tiles: ExpertTiles, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 32).half()
    routed = RoutedTokens(
        torch.full((num_tokens, 1), 3, dtype=torch.int32), torch.rand(num_tokens, 1)
    )
    matrices = draw_matrices(5, 32, 32, torch.float16, "cpu")
    matrices.gate_up[[0, 1, 2, 4]] = torch.nan  # nobody chooses them
    multiply = partial(multiply_rows, tiles=tiles, pdl=False)
    check_products(multiply, x, routed, ExpertMatrices(*matrices[:2], 0))


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize(("first", "count"), [exhaustively(0, 2), (2, 5), (6, 1)])
def test_a_rank_with_some_of_the_experts(num_tokens: int, first: int, count: int) -> None:
    x = torch.randn(num_tokens, 32).half()
    matrices = draw_matrices(count, 32, 48, torch.float16, "cpu", first)
    check_products(OPS.multiply, x, draw_routed(num_tokens, 3, 8, "cpu"), matrices)


@pytest.mark.parametrize("dtype", [exhaustively(torch.float16), torch.bfloat16], ids=str)
@pytest.mark.parametrize(("hidden", "inner"), [exhaustively(64, 32), (40, 24)])
def test_one_row(dtype: torch.dtype, hidden: int, inner: int) -> None:
    tile = RowTile(block_o=4, block_i=32, num_warps=4)
    multiply = partial(multiply_row, gate_up_tile=tile, down_tile=tile, pdl=False)
    x = torch.randn(1, hidden).to(dtype)
    matrices = draw_matrices(6, hidden, inner, dtype, "cpu")
    check_products(multiply, x, draw_routed(1, 3, 6, "cpu"), matrices)
    check_products(OPS.multiply, x, draw_routed(1, 3, 6, "cpu"), matrices)
    check_products(OPS.multiply, x, draw_routed(0, 3, 6, "cpu", 1), matrices)


def test_a_row_does_not_depend_on_its_neighbors() -> None:
    x, matrices = torch.randn(12, 32).half(), draw_matrices(4, 32, 32, torch.float16, "cpu")
    routed = draw_routed(12, 2, 4, "cpu")
    multiply = partial(multiply_rows, tiles=TILES["left"], pdl=False)
    together = multiply(x, routed, matrices)
    part = RoutedTokens(routed.experts[3:7].contiguous(), routed.weights[3:7].contiguous())
    assert torch.equal(multiply(x[3:7].contiguous(), part, matrices), together[3:7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 100])
def test_chosen_tiles(dtype: torch.dtype, num_tokens: int) -> None:
    x, matrices = torch.randn(num_tokens, 64).to(dtype), draw_matrices(4, 64, 64, dtype, "cpu")
    check_products(OPS.multiply, x, draw_routed(num_tokens, 2, 4, "cpu"), matrices)


@pytest.mark.parametrize("form", ["row", "block"])
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [exhaustively(1, torch.float16), (6, torch.float16), (2, torch.float32)],
)
def test_weights_in_fp8(form: str, num_tokens: int, dtype: torch.dtype) -> None:
    sizes = (256, 128) if form == "block" else (48, 40)
    matrices = quantized(draw_matrices(3, *sizes, dtype, "cpu", first=1), form)
    x, routed = torch.randn(num_tokens, sizes[0]).to(dtype), draw_routed(num_tokens, 2, 5, "cpu")
    tiles = TILES["left" if num_tokens > 2 else "right"]
    check_products(partial(multiply_rows, tiles=tiles, pdl=False), x, routed, matrices)
    check_products(OPS.multiply, x, routed, matrices)
    check_products(TorchExperts().multiply, x, routed, matrices)


@pytest.mark.parametrize(
    ("dtype", "tiles"),
    [
        (torch.float16, TILES["left"]),
        (torch.float16, TILES["right"]),
        (torch.float32, TILES["right"]),
    ],
)
@pytest.mark.parametrize(("hidden", "inner"), [(32, 64), (40, 24)])
def test_biases_and_clamped_activations(
    dtype: torch.dtype, tiles: ExpertTiles, hidden: int, inner: int
) -> None:
    x, routed = torch.randn(23, hidden).to(dtype), draw_routed(20, 2, 5, "cpu", 3)
    matrices = with_biases(draw_matrices(4, hidden, inner, dtype, "cpu", first=1))
    check_products(partial(multiply_rows, tiles=tiles, pdl=False), x, routed, matrices)
    check_products(TorchExperts().multiply, x, routed, matrices)


@pytest.mark.parametrize(("dtype", "down"), [(torch.float16, False), (torch.bfloat16, True)])
def test_biases_and_clamped_activation_of_one_row(dtype: torch.dtype, down: bool) -> None:
    """The first expert is another rank's, and harms nothing."""
    x, routed = torch.randn(1, 40).to(dtype), draw_routed(1, 4, 6, "cpu")
    matrices = with_biases(draw_matrices(5, 40, 24, dtype, "cpu", first=1), down=down)
    tile = RowTile(block_o=4, block_i=32, num_warps=4)
    check_products(
        partial(multiply_row, gate_up_tile=tile, down_tile=tile, pdl=False), x, routed, matrices
    )
    matrices.gate_up_bias[0] = torch.nan
    elsewhere = RoutedTokens(torch.tensor([[0, 3, 4, 5]], dtype=torch.int32), routed.weights)
    assert OPS.multiply(x, elsewhere, matrices).isfinite().all()
    if down:
        matrices.down_bias[0] = torch.nan
        assert OPS.multiply(x, elsewhere, matrices).isfinite().all()


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_biases_of_weights_in_fp8(num_tokens: int) -> None:
    matrices = with_biases(quantized(draw_matrices(3, 48, 40, torch.float16, "cpu"), "row"))
    x = torch.randn(num_tokens, 48).half()
    check_products(OPS.multiply, x, draw_routed(num_tokens, 2, 3, "cpu"), matrices)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_nan_passes_the_clamped_activation(num_tokens: int) -> None:
    x, routed = torch.randn(num_tokens, 32).half(), draw_routed(num_tokens, 2, 4, "cpu")
    matrices = with_biases(draw_matrices(4, 32, 32, torch.float16, "cpu"))
    matrices.gate_up_bias[:, 3] = torch.nan
    assert OPS.multiply(x, routed, matrices).isnan().all()


class MixedOps(TorchOps):
    """Plain torch, but for the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = OPS


NORM = NormSpec("norm", 1e-6)
LAYERS = {
    "shared": ExpertsSpec(NORM, 4, 32, Routing(2, True, True), SharedExpertSpec(16)),
    "biased": ExpertsSpec(
        NORM, 4, 32, Routing(2, True, True), has_biases=True, clamped=ClampedSwiGLU(1.702, 0.02),
        checkpoint_form="mxfp4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize("spec", LAYERS.values(), ids=LAYERS)
def test_a_layer_of_a_model(spec: ExpertsSpec, is_quantized: bool) -> None:
    """Routing, padding and the block's own views of its parameters."""
    results = []
    for ops in (TorchOps(), MixedOps()):
        setup = LayerSetup(
            48, SingleRank(), torch.float32, torch.device("cpu"), ops,
            quantization=ONLINE if is_quantized else None,
        )  # fmt: skip
        block = ExpertsBlock("model.layers.0", spec, setup)
        load_dummy_weights(block.parameters(), 1, lambda progress: None)
        torch.manual_seed(3)
        part, residual = torch.randn(2, 9, 48)
        starts = torch.tensor([0, 4, 7, 7], dtype=torch.int32)
        results.append(block.forward(part, residual, starts))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
