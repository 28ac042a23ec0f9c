"""The operations of experts in plain torch, for the CPU and as the reference for faster ones."""

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.experts import ClampedSwiGLU, ExpertMatrices, RoutedTokens, Routing
from worker_daemon.contracts.layer_ops import Fp8Matrix


class TorchExperts:
    """ExpertOps on any device; on a GPU it waits for the experts' numbers."""

    def route(
        self,
        scores: Tensor,
        routing: Routing,
        query_start_loc: Tensor,
        loads: Tensor | None = None,
        replayed: Tensor | None = None,
    ) -> RoutedTokens:
        """See ExpertOps."""
        # topk leaves the order of equal values open.
        ordered = scores.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
        experts = ordered.indices[:, : routing.top_k].to(torch.int32)
        if replayed is not None:
            experts = torch.where(replayed < 0, experts, replayed.to(torch.int32))
        rows = torch.arange(scores.shape[0], device=scores.device)
        is_padding = (rows >= query_start_loc[-1]).unsqueeze(1)
        if loads is not None:
            chosen = experts[~is_padding.flatten()]
            loads += torch.bincount(chosen.flatten(), minlength=loads.numel())
        return routing.given_to(experts.masked_fill(is_padding, -1), scores)

    def multiply(self, x: Tensor, routed: RoutedTokens, matrices: ExpertMatrices) -> Tensor:
        """See ExpertOps."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(routed.experts.flatten().tolist())):
            local = number - matrices.first
            if number < 0 or not 0 <= local < matrices.down.shape[0]:
                continue
            rows, places = torch.where(routed.experts == number)
            gate_up = _matrix(matrices.gate_up, matrices.gate_up_scale, local, x.dtype)
            down = _matrix(matrices.down, matrices.down_scale, local, x.dtype)
            gate_up_bias, down_bias = (
                None if bias is None else bias[local]
                for bias in (matrices.gate_up_bias, matrices.down_bias)
            )
            gate, up = functional.linear(x[rows], gate_up, gate_up_bias).chunk(2, dim=-1)
            y = functional.linear(_activated(gate, up, matrices.clamped), down, down_bias)
            total.index_add_(0, rows, y.float() * routed.weights[rows, places].unsqueeze(1))
        return total.to(x.dtype)


def _activated(gate: Tensor, up: Tensor, clamped: ClampedSwiGLU | None) -> Tensor:
    if clamped is None:
        return functional.silu(gate) * up
    limited = gate.float().clamp(max=clamped.limit)
    shifted = up.float().clamp(-clamped.limit, clamped.limit) + 1
    return (shifted * limited * torch.sigmoid(clamped.alpha * limited)).to(gate.dtype)


def _matrix(stack: Tensor, scale: Tensor | None, local: int, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return stack[local]
    return Fp8Matrix(stack[local], scale[local], None, "none").dequantized(dtype)
