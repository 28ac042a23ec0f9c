"""Checks of the operations of experts on any device and at any size, used by the tests under
Triton's interpreter and on a GPU."""

from collections.abc import Callable

import torch
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts

from worker_daemon.contracts.experts import (
    ClampedSwiGLU,
    ExpertMatrices,
    ExpertOps,
    RoutedTokens,
    Routing,
)
from worker_daemon.contracts.layer_ops import LayerOps, Norm, NormedSum

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Relative errors: h, y and the sum are rounded once each."""

Multiply = Callable[[torch.Tensor, RoutedTokens, ExpertMatrices], torch.Tensor]


def starts(num_tokens: int, device: str) -> torch.Tensor:
    """Return query_start_loc of a few sequences, padded as a step's columns are."""
    ends = [0, num_tokens // 3, num_tokens, num_tokens]
    return torch.tensor(ends, dtype=torch.int32, device=device)


def draw_matrices(
    count: int, hidden: int, inner: int, dtype: torch.dtype, device: str, first: int = 0
) -> ExpertMatrices:
    """Return random matrices of `count` experts, whose products have values of size 1."""
    gate_up = torch.randn(count, 2 * inner, hidden, device=device) * 2 / hidden**0.5
    down = torch.randn(count, hidden, inner, device=device) / inner**0.5
    return ExpertMatrices(gate_up.to(dtype), down.to(dtype), first)


def quantized(matrices: ExpertMatrices, form: str) -> ExpertMatrices:
    """Return random matrices of these sizes in FP8, with a scale for each "row" or "block"."""
    stacks, scales = [], []
    for stack in (matrices.gate_up, matrices.down):
        values = torch.randn(stack.shape, device=stack.device) * 100
        stacks.append(values.clamp(-448, 448).to(torch.float8_e4m3fn))
        shape = list(stack.shape[:2])
        if form == "block":
            shape = [shape[0], -(-shape[1] // 128), -(-stack.shape[2] // 128)]
        scales.append((torch.rand(shape, device=stack.device) + 0.1) / 100 / stack.shape[2] ** 0.5)
    return ExpertMatrices(*stacks, matrices.first, *scales)


def with_biases(matrices: ExpertMatrices, *, down: bool = True) -> ExpertMatrices:
    """Return the matrices with random biases and a clamped activation, whose limit is often
    reached. down: False on a rank that leaves the downs' biases to another."""
    count, hidden, inner = matrices.down.shape
    dtype = torch.float16 if matrices.down.dtype == torch.float8_e4m3fn else matrices.down.dtype
    device = matrices.down.device
    return matrices._replace(
        gate_up_bias=torch.randn(count, 2 * inner, device=device).to(dtype),
        down_bias=torch.randn(count, hidden, device=device).to(dtype) if down else None,
        clamped=ClampedSwiGLU(1.702, 1.25),
    )


def exact_matrix(stack: torch.Tensor, scale: torch.Tensor | None, local: int) -> torch.Tensor:
    """Return an expert's matrix in float64."""
    values = stack[local].double()
    if scale is None:
        return values
    spread = scale[local].double()
    if spread.dim() == 1:
        return values * spread.unsqueeze(1)
    spread = spread.repeat_interleave(128, 0)[: values.shape[0]]
    return values * spread.repeat_interleave(128, 1)[:, : values.shape[1]]


def draw_routed(
    num_tokens: int, top_k: int, num_experts: int, device: str, num_padding: int = 0
) -> RoutedTokens:
    """Return distinct experts for each token, uniformly, then rows of padding."""
    keys = torch.rand(num_tokens + num_padding, num_experts, device=device)
    experts = keys.argsort(1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(experts.shape, device=device)
    experts[num_tokens:], weights[num_tokens:] = -1, 0.0
    return RoutedTokens(experts, weights)


def expected_sum(x: torch.Tensor, routed: RoutedTokens, matrices: ExpertMatrices) -> torch.Tensor:
    """Return the sum in float64, one expert at a time."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for local in range(matrices.down.shape[0]):
        rows, places = torch.where(routed.experts == matrices.first + local)
        gate_up = exact_matrix(matrices.gate_up, matrices.gate_up_scale, local)
        down = exact_matrix(matrices.down, matrices.down_scale, local)
        both = x[rows].double() @ gate_up.T
        if matrices.gate_up_bias is not None:
            both += matrices.gate_up_bias[local].double()
        y = exact_activation(*both.chunk(2, 1), matrices.clamped) @ down.T
        if matrices.down_bias is not None:
            y += matrices.down_bias[local].double()
        total.index_add_(0, rows, y * routed.weights[rows, places].double().unsqueeze(1))
    return total


def exact_activation(
    gate: torch.Tensor, up: torch.Tensor, clamped: ClampedSwiGLU | None
) -> torch.Tensor:
    """Return the activation in float64; a clamped one as transformers' GPT-OSS has it."""
    if clamped is None:
        return functional.silu(gate) * up
    fields = {"hidden_size": 1, "intermediate_size": 1, "num_local_experts": 1}
    experts = GptOssExperts(GptOssConfig(**fields))
    experts.alpha, experts.limit = clamped
    return experts._apply_gate(torch.stack((gate, up), 2).flatten(1))


def check_products(
    multiply: Multiply, x: torch.Tensor, routed: RoutedTokens, matrices: ExpertMatrices
) -> None:
    """Check a sum over experts against float64, and on a GPU, where programs run at once, that
    repeating it gives the same bits."""
    expected = expected_sum(x, routed, matrices)
    y = multiply(x, routed, matrices)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    error = (y.double() - expected).norm() / expected.norm().clamp(min=1e-30)
    assert error < BOUNDS[x.dtype], error
    is_unused = ((routed.experts < matrices.first)
        | (routed.experts >= matrices.first + matrices.down.shape[0])).all(1)  # fmt: skip
    assert (y[is_unused] == 0).all()
    if x.is_cuda:
        assert torch.equal(multiply(x, routed, matrices), y)


def check_routing(
    ops: ExpertOps,
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, int],
    routing: Routing,
    num_tokens: int,
) -> None:
    """Check experts and weights of random scores against float64; equal scores are frequent, as
    rounded ones are."""
    scores = (torch.randn(shape, device=device) * 8).round().div(4).to(dtype)
    experts, weights = ops.route(scores, routing, starts(num_tokens, device))
    assert experts.dtype == torch.int32
    assert weights.dtype == torch.float32
    share = scores.double().softmax(1)
    order = share.sort(dim=1, descending=True, stable=True)
    expected = order.values[:, : routing.top_k]
    if routing.renormalize:
        expected = expected / expected.sum(1, keepdim=True)
    if routing.rounds_weights:
        expected = expected.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 or not routing.rounds_weights else 1e-2
    assert torch.equal(experts[:num_tokens].long(), order.indices[:num_tokens, : routing.top_k])
    torch.testing.assert_close(
        weights[:num_tokens], expected[:num_tokens].float(), rtol=tolerance, atol=1e-7
    )
    if routing.rounds_weights:
        assert torch.equal(weights, weights.to(dtype).float())
    assert (experts[num_tokens:] == -1).all()
    assert (weights[num_tokens:] == 0).all()


def check_normed_routing(
    ops: LayerOps,
    dtype: torch.dtype,
    device: str,
    num_tokens: int,
    *,
    hidden: int,
    num_experts: int,
    has_part: bool,
    has_bias: bool,
) -> None:
    """Check the norm, the sum and the experts of rows, the last of which is padding unless it is
    the only one, against torch in float64."""
    routing = Routing(min(3, num_experts), True, False)
    x, residual = torch.randn(2, num_tokens, hidden, device=device).to(dtype)
    gain = torch.rand(hidden, device=device).to(dtype) + 0.5
    router = torch.randn(num_experts, hidden, device=device).to(dtype)
    bias = torch.randn(num_experts, device=device).to(dtype) if has_bias else None
    loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
    num_used = max(1, num_tokens - 1)
    bounds = torch.tensor([0, num_used, num_used], dtype=torch.int32, device=device)
    source = NormedSum(x if has_part else None, residual, Norm(gain, 1e-6))
    for repeat in range(1, 3):
        normed, total, routed = ops.route(source, router, bias, routing, bounds, loads)
        assert torch.equal(total, residual + x if has_part else residual)
        exact = functional.rms_norm(total.double(), [hidden], gain.double(), 1e-6)
        torch.testing.assert_close(normed.double(), exact, rtol=2 * BOUNDS[dtype], atol=1e-3)
        scores = functional.linear(
            normed.double(), router.double(), None if bias is None else bias.double()
        )
        chosen = routed.experts[:num_used].long()
        best = scores[:num_used].topk(routing.top_k).values
        found = scores[:num_used].gather(1, chosen)
        slack = 2 * BOUNDS[dtype] * float(scores.abs().max())
        torch.testing.assert_close(found, best, rtol=0.0, atol=slack)
        torch.testing.assert_close(
            routed.weights[:num_used].double(), found.softmax(1), rtol=0.0, atol=slack
        )
        assert (routed.experts[num_used:] == -1).all()
        assert torch.equal(loads, repeat * torch.bincount(chosen.flatten(), minlength=num_experts))


def check_loads(
    ops: ExpertOps,
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, int],
    routing: Routing,
    num_tokens: int,
) -> None:
    """Check what routing adds to the expert loads, which are not 0 before, against its choices;
    choices and weights are those without loads."""
    num_experts, query_start_loc = shape[1], starts(num_tokens, device)
    before = torch.randint(1 << 40, (num_experts,), device=device)
    loads, expected = before.clone(), before.clone()
    for _ in range(3):
        scores = torch.randn(shape, device=device).to(dtype)
        scores[0, num_experts // 2] = torch.nan
        counted = ops.route(scores, routing, query_start_loc, loads)
        plain = ops.route(scores, routing, query_start_loc)
        assert torch.equal(counted.experts, plain.experts)
        torch.testing.assert_close(
            counted.weights, plain.weights, rtol=0.0, atol=0.0, equal_nan=True
        )
        chosen = plain.experts[plain.experts >= 0]
        assert chosen.numel() == num_tokens * routing.top_k
        expected += torch.bincount(chosen, minlength=num_experts)
        assert torch.equal(loads, expected)


def check_replay(
    ops: ExpertOps,
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, int],
    routing: Routing,
    num_tokens: int,
) -> None:
    """Check that every second token takes given experts, the worst ones, with the weights that
    float64 gives them, that the others choose as ever, and that loads count both."""
    num_experts, query_start_loc = shape[1], starts(num_tokens, device)
    scores = torch.randn(shape, device=device).to(dtype)
    replayed = scores.argsort(-1)[:, : routing.top_k].to(torch.int16)
    replayed[1::2] = -1
    replayed[num_tokens:] = -1
    loads = torch.zeros(num_experts, dtype=torch.int64, device=device)
    found = ops.route(scores, routing, query_start_loc, loads, replayed)
    plain = ops.route(scores, routing, query_start_loc)
    is_given = replayed[:, 0] >= 0
    assert torch.equal(found.experts[is_given], replayed[is_given].int())
    assert torch.equal(found.experts[~is_given], plain.experts[~is_given])
    slack = 1e-6 + routing.rounds_weights * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found.weights[~is_given], plain.weights[~is_given], rtol=0.0, atol=slack
    )
    weights = scores.double().softmax(-1).gather(1, replayed.long().clamp(min=0))
    if routing.renormalize:
        weights /= weights.sum(-1, keepdim=True)
    torch.testing.assert_close(
        found.weights[is_given].double(), weights[is_given], rtol=0.0, atol=slack
    )
    chosen = found.experts[found.experts >= 0]
    assert chosen.numel() == num_tokens * routing.top_k
    assert torch.equal(loads, torch.bincount(chosen, minlength=num_experts))


def check_unusual_scores(ops: ExpertOps, device: str, num_experts: int) -> None:
    """Check rows of NaN and infinity: experts that exist, no two alike, and weights that are NaN;
    other rows are unharmed."""
    scores = torch.randn(5, num_experts, device=device)
    usual = scores.clone()
    scores[1] = torch.nan
    scores[2, num_experts // 2] = torch.nan
    scores[3, 0] = torch.inf
    routing = Routing(min(4, num_experts), True, False)
    found = ops.route(scores, routing, starts(5, device))
    expected = ops.route(usual, routing, starts(5, device))
    for row in (0, 4):
        assert all(torch.equal(a[row], b[row]) for a, b in zip(found, expected, strict=True))
    experts = found.experts
    assert ((experts >= 0) & (experts < num_experts)).all()
    assert all(len(set(row)) == routing.top_k for row in experts.tolist())
    assert found.weights[1:4].isnan().any(1).all()
