"""Routing and products of experts in plain torch, against transformers' blocks and by their own
rules."""

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from worker_daemon.contracts.experts import (
    ClampedSwiGLU,
    ExpertMatrices,
    RoutedTokens,
    Routing,
)
from worker_daemon.layers.torch_experts import TorchExperts

NUM_EXPERTS, HIDDEN, INNER = 8, 24, 20
OPS = TorchExperts()


def starts(num_tokens):
    """query_start_loc of one sequence, as long as that."""
    return torch.tensor([0, num_tokens], dtype=torch.int32)


def drawn_matrices(first=0, count=NUM_EXPERTS):
    return ExpertMatrices(
        torch.randn(count, 2 * INNER, HIDDEN), torch.randn(count, HIDDEN, INNER), first
    )


def one_expert(x, matrices, expert):
    gate, up = (matrices.gate_up[expert] @ x).chunk(2)
    return matrices.down[expert] @ (torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("family", ["mixtral", "qwen", "qwen_renormalized"])
@pytest.mark.parametrize("top_k", [1, 3, NUM_EXPERTS])
def test_blocks_of_transformers(family, top_k):
    sizes = {"hidden_size": HIDDEN, "num_experts_per_tok": top_k, "num_local_experts": NUM_EXPERTS}
    if family == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=INNER, **sizes)
        block, routing = MixtralSparseMoeBlock(config), Routing(top_k, True, False)
    else:
        renormalize = family == "qwen_renormalized"
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=INNER, norm_topk_prob=renormalize, **sizes
        )
        block, routing = Qwen3MoeSparseMoeBlock(config), Routing(top_k, renormalize, True)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(13, HIDDEN)
    with torch.no_grad():
        expected = block(x.unsqueeze(0))[0]
        routed = OPS.route(x @ block.gate.weight.T, routing, starts(13))
        matrices = ExpertMatrices(block.experts.gate_up_proj, block.experts.down_proj, 0)
        ours = OPS.multiply(x, routed, matrices)
    assert torch.allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_biases_and_the_clamped_activation_of_gpt_oss(limit):
    config = transformers.GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3, swiglu_limit=limit,
    )  # fmt: skip
    block = GptOssMLP(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x, router, experts = torch.randn(13, HIDDEN), block.router, block.experts
    pairs = torch.arange(2 * INNER).view(-1, 2).t().flatten()
    with torch.no_grad():
        expected = block(x.unsqueeze(0))[0][0]
        scores = x @ router.weight.T + router.bias
        ours = OPS.multiply(
            x,
            OPS.route(scores, Routing(3, True, True), starts(13)),
            ExpertMatrices(
                experts.gate_up_proj.mT[:, pairs],
                experts.down_proj.mT,
                0,
                gate_up_bias=experts.gate_up_proj_bias[:, pairs],
                down_bias=experts.down_proj_bias,
                clamped=ClampedSwiGLU(1.702, limit),
            ),
        )
    assert torch.allclose(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("renormalize", [False, True])
def test_among_equals_the_lower_expert_comes_first(renormalize):
    scores = torch.zeros(2, NUM_EXPERTS)
    scores[1, [2, 5, 6]] = 1.0
    routed = OPS.route(scores, Routing(2, renormalize, False), starts(2))
    assert routed.experts.tolist() == [[0, 1], [2, 5]]
    share = scores.softmax(-1)[[0, 1], [0, 2]]
    expected = torch.full((2, 2), 0.5) if renormalize else share.unsqueeze(1).expand(2, 2)
    torch.testing.assert_close(routed.weights, expected)


def test_weights_are_rounded_where_the_family_rounds_them():
    scores = torch.randn(5, NUM_EXPERTS).bfloat16()
    exact = OPS.route(scores, Routing(3, True, False), starts(5)).weights
    rounded = OPS.route(scores, Routing(3, True, True), starts(5)).weights
    assert torch.equal(rounded, exact.bfloat16().float())
    assert not torch.equal(rounded, exact)


def test_padding_goes_to_no_expert():
    scores, x, matrices = torch.randn(7, NUM_EXPERTS), torch.randn(7, HIDDEN), drawn_matrices()
    x[4:] = torch.nan
    routed = OPS.route(scores, Routing(2, True, False), starts(4))
    assert (routed.experts[4:] == -1).all() and (routed.weights[4:] == 0).all()
    alone = OPS.route(scores[:4], Routing(2, True, False), starts(4))
    assert all(torch.equal(a[:4], b) for a, b in zip(routed, alone, strict=True))
    y = OPS.multiply(x, routed, matrices)
    assert torch.equal(y[:4], OPS.multiply(x[:4], alone, matrices))
    assert (y[4:] == 0).all()


def test_an_expert_that_nobody_chooses_is_not_read():
    matrices, x = drawn_matrices(), torch.randn(6, HIDDEN)
    scores = torch.randn(6, NUM_EXPERTS)
    scores[:, 3] = -30.0
    routed = OPS.route(scores, Routing(4, True, False), starts(6))
    expected = OPS.multiply(x, routed, matrices)
    matrices.gate_up[3] = matrices.down[3] = torch.nan
    assert torch.equal(OPS.multiply(x, routed, matrices), expected)


def test_all_rows_to_one_expert():
    matrices, x = drawn_matrices(), torch.randn(9, HIDDEN)
    routed = RoutedTokens(torch.full((9, 1), 5, dtype=torch.int32), torch.full((9, 1), 0.25))
    expected = torch.stack([one_expert(row, matrices, 5) / 4 for row in x])
    torch.testing.assert_close(OPS.multiply(x, routed, matrices), expected, atol=1e-4, rtol=1e-4)


def test_ranks_with_parts_of_the_experts_add_up():
    matrices, x = drawn_matrices(), torch.randn(11, HIDDEN)
    routed = OPS.route(torch.randn(11, NUM_EXPERTS), Routing(3, False, False), starts(10))
    whole = OPS.multiply(x, routed, matrices)
    parts = [
        OPS.multiply(x, routed, ExpertMatrices(*(part[rows] for part in matrices[:2]), rows.start))
        for rows in (slice(0, 3), slice(3, 4), slice(4, 8))
    ]
    torch.testing.assert_close(sum(parts), whole, atol=1e-5, rtol=1e-5)


def test_a_row_with_a_nan_has_experts_and_harms_no_other():
    scores = torch.randn(3, NUM_EXPERTS)
    scores[1, 4] = torch.nan
    routed = OPS.route(scores, Routing(2, True, False), starts(3))
    assert ((routed.experts >= 0) & (routed.experts < NUM_EXPERTS)).all()
    y = OPS.multiply(torch.randn(3, HIDDEN), routed, drawn_matrices())
    assert y[1].isnan().all() and y[[0, 2]].isfinite().all()
