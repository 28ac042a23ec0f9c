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
    Epilogue,
    Fp8Matrix,
    GateUp,
    HeadNorms,
    Matrix,
    Norm,
    NormedSum,
    RowAdapters,
    Source,
    SpanNorms,
    computed,
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
        self._fp8 = Fp8Linear(device)
        self.experts = TritonExperts(device)
        self._int4 = Int4Linear(device)

    def product(
        self, source: Source, matrix: Matrix, epilogue: Epilogue
    ) -> tuple[torch.Tensor | GateUp, torch.Tensor]:
        """source [N, K], matrix [M, K] -> [N, M], or [N, M / 2] with an activation; and the
        source's sum [N, K]. Without adapters, norm and activation are fused with the product where
        a kernel of the matrix's format can."""
        bias, adapters, activation, out, is_separate = epilogue
        fused: tuple[torch.Tensor | GateUp, torch.Tensor] | None = None
        if adapters is None and not is_separate:
            if isinstance(matrix, torch.Tensor):
                fused = self._thin.fused(source, matrix, bias, activation, out)
            elif isinstance(matrix, Fp8Matrix):
                fused = self._fp8.fused(source, matrix, bias, activation)
        if fused is not None:
            return fused
        y, total = self._separate(source, matrix, bias, adapters, out)
        return (y if activation is None else self.act_and_mul(y, activation)), total

    def _separate(
        self,
        source: Source,
        matrix: Matrix,
        bias: torch.Tensor | None,
        adapters: RowAdapters | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return product's results without an activation, norm and product by kernels of their
        own."""
        x, total = computed(source, self)
        if adapters is not None and isinstance(matrix, torch.Tensor):
            return self._adapted.linear(x, matrix, bias, *adapters), total
        y = self._linear(x, matrix, bias, out)
        if adapters is not None:
            self._adapted.add(y, x, *adapters)
        return y, total

    def _linear(
        self,
        x: torch.Tensor,
        matrix: Matrix,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if isinstance(matrix, Fp8Matrix):
            return self._fp8.linear(x, matrix, bias)
        if isinstance(matrix, Int4Matrix):
            return self._int4.linear(x, matrix, bias)
        return self._thin.linear(x, matrix, bias, out)

    def route(
        self,
        source: torch.Tensor | NormedSum,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        routing: Routing,
        query_start_loc: torch.Tensor,
        loads: torch.Tensor | None,
        replayed: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens]:
        """router [E, H], bias [E], loads int64 [E] -> norm and sum [N, H], and experts. The norm of
        one row is part of one launch, unless its experts are replayed."""
        if replayed is None and isinstance(source, NormedSum) and source.residual.shape[0] == 1:
            return self.experts.route_row(source, router, bias, routing, query_start_loc, loads)
        x, total = computed(source, self)
        scores = self._thin.linear(x, router, bias)
        return x, total, self.experts.route(scores, routing, query_start_loc, loads, replayed)

    def sum_and_norm(self, source: NormedSum) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm and the sum, [N, H]."""
        return sum_and_norm(source, pdl=self._pdl)

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
