"""The layer operations for GPUs: Triton kernels and torch's matrix products behind one object.

Shapes: N tokens, H hidden size, I inner size of the MLP, Hq / Hkv query and KV heads, D head
dimension.
"""

import torch

from worker_daemon.contracts.experts import RoutedTokens, Routing
from worker_daemon.contracts.int4 import Int4Matrix
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import (
    Activation,
    AdapterWeights,
    HeadNorms,
    Norm,
    NormedSum,
    SpanNorms,
)
from worker_daemon.kernels.activation import act_and_mul
from worker_daemon.kernels.adapted_linear import AdaptedLinear
from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.experts import TritonExperts
from worker_daemon.kernels.fp8_linear import Fp8Linear
from worker_daemon.kernels.int4_linear import Int4Linear
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.norm import rms_norm, rms_norm_add, sum_and_norm
from worker_daemon.kernels.rope_store import rotate_and_store
from worker_daemon.kernels.row_linear import launch_row, row_norm
from worker_daemon.kernels.span_norm import norm_spans, span_means


class TritonOps:
    """LayerOps on one CUDA device, one object for all layers. Owns the counters of the linear
    products; step thread only."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._pdl = has_dependent_launch(device)
        self._thin = ThinLinear(device)
        self._adapted = AdaptedLinear(device, self._thin)
        self.fp8 = Fp8Linear(device)
        self.experts = TritonExperts(device)
        self._int4 = Int4Linear(device)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [N, K] times weight [M, K] transposed, plus bias [M] -> [N, M]; out: see LayerOps."""
        return self._thin.linear(x, weight, bias, out)

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> torch.Tensor:
        """x [N, K], weight [2 I, K], gate first, bias [2 I] -> [N, I]."""
        tile = self._thin.row_tile(x, weight)
        if tile is None:
            return self.act_and_mul(self.linear(x, weight, bias), activation)
        y = x.new_empty(1, weight.shape[0] // 2)
        launch_row(y, x, weight, bias, tile, pdl=self._pdl, gate=activation)
        return y

    def norm_linear(
        self, source: NormedSum, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """weight [M, H], bias [M] -> the product with source's norm [N, M], and source's sum [N,
        H]."""
        tile = self._thin.row_tile(source.residual, weight)
        if tile is None:
            normed, total = self.sum_and_norm(source)
            return self.linear(normed, weight, bias), total
        y = source.residual.new_empty(1, weight.shape[0])
        x, norm = row_norm(source, pdl=self._pdl)
        launch_row(y, x, weight, bias, tile, pdl=self._pdl, norm=norm)
        return y, norm.total

    def norm_gated_linear(
        self,
        source: NormedSum,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like norm_linear, with weight [2 I, H], gate first -> [N, I] and [N, H]."""
        tile = self._thin.row_tile(source.residual, weight)
        if tile is None:
            gate_up, total = self.norm_linear(source, weight, bias)
            return self.act_and_mul(gate_up, activation), total
        x, norm = row_norm(source, pdl=self._pdl)
        y = x.new_empty(1, weight.shape[0] // 2)
        launch_row(y, x, weight, bias, tile, pdl=self._pdl, norm=norm, gate=activation)
        return y, norm.total

    def norm_route(
        self,
        source: NormedSum,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        routing: Routing,
        query_start_loc: torch.Tensor,
        loads: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens]:
        """router [E, H], bias [E], loads int64 [E] -> norm and sum [N, H], and experts. One row is
        one launch."""
        if source.residual.shape[0] == 1:
            return self.experts.route_row(source, router, bias, routing, query_start_loc, loads)
        normed, total = self.sum_and_norm(source)
        scores = self.linear(normed, router, bias)
        return normed, total, self.experts.route(scores, routing, query_start_loc, loads)

    def int4_linear(
        self, x: torch.Tensor, matrix: Int4Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [N, K], matrix [M, K], bias [M] -> [N, M]."""
        return self._int4.linear(x, matrix, bias)

    def sum_and_norm(self, source: NormedSum) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm and the sum, [N, H]."""
        return sum_and_norm(source, pdl=self._pdl)

    def add_adapters(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> None:
        """y [N, M] changes; x [N, K], token_slots int32 [N]."""
        self._adapted.add(y, x, adapters, token_slots)

    def adapted_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
    ) -> torch.Tensor:
        """x [N, K], weight [M, K], bias [M], token_slots int32 [N] -> [N, M]."""
        return self._adapted.linear(x, weight, bias, adapters, token_slots)

    def adapted_gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: AdapterWeights,
        token_slots: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """x [N, K], weight [2 I, K], gate first, bias [2 I], token_slots int32 [N] -> [N, I]."""
        return self._adapted.gated_linear(x, weight, bias, adapters, token_slots, activation)

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        return rms_norm(x, norm, pdl=self._pdl)

    def rms_norm_add(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        """x and residual [N, H] -> the sum, new."""
        return rms_norm_add(x, residual, norm, pdl=self._pdl)

    def act_and_mul(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """gate_up [N, 2 I], gate first -> [N, I]."""
        return act_and_mul(gate_up, activation, pdl=self._pdl)

    def greedy_tokens(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """logits [R, >= vocab_size], rows contiguous -> int64 [R]."""
        return greedy_tokens(logits, vocab_size, pdl=self._pdl)

    def span_means(self, qkv: torch.Tensor, norms: SpanNorms, num_ranks: int) -> torch.Tensor:
        """qkv [N, (Hq + 2 Hkv) D] -> float32 [N, 2]."""
        return span_means(qkv, norms, num_ranks, pdl=self._pdl)

    def norm_spans(
        self, qkv: torch.Tensor, norms: SpanNorms, means: torch.Tensor | None = None
    ) -> torch.Tensor:
        """qkv [N, (Hq + 2 Hkv) D], which is overwritten, means float32 [N, 2] -> qkv."""
        return norm_spans(qkv, norms, means, pdl=self._pdl)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_table: torch.Tensor,
        num_kv_heads: int,
        head_dim: int,
        head_norms: HeadNorms | None,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_scales: KVScales | None = None,
        *,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """qkv [N, (Hq + 2 Hkv) D] -> q [N, Hq, D], a view of qkv, which is overwritten."""
        return rotate_and_store(
            qkv,
            positions,
            rotary_table,
            num_kv_heads,
            head_dim,
            head_norms,
            kv_cache,
            slot_mapping,
            kv_scales,
            interleaved=interleaved,
            pdl=self._pdl,
        )
