"""The layer operations in plain torch, for the CPU and as the reference for faster ones."""

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.experts import RoutedTokens, Routing
from worker_daemon.contracts.int4 import Int4Matrix
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import (
    NO_TOKEN,
    Activation,
    AdapterWeights,
    Fp8Matrix,
    GateUp,
    HeadNorms,
    Norm,
    NormedSum,
    SpanNorms,
    activated,
)
from worker_daemon.layers.fp8_cache import quantize
from worker_daemon.layers.rotary import rotate
from worker_daemon.layers.torch_experts import TorchExperts


class TorchOps:
    """LayerOps on any device."""

    name = "torch"

    def __init__(self) -> None:
        self.fp8 = DequantizingOps(self)
        self.experts = TorchExperts()

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            return functional.linear(x, weight, bias)
        assert bias is None
        return torch.mm(x, weight.t(), out=out)

    def gated_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        return self.act_and_mul(self.linear(x, weight, bias), activation)

    def norm_linear(
        self, source: NormedSum, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        normed, total = self.sum_and_norm(source)
        return self.linear(normed, weight, bias), total

    def norm_gated_linear(
        self, source: NormedSum, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        gate_up, total = self.norm_linear(source, weight, bias)
        return self.act_and_mul(gate_up, activation), total

    def norm_route(
        self,
        source: NormedSum,
        router: Tensor,
        bias: Tensor | None,
        routing: Routing,
        query_start_loc: Tensor,
        loads: Tensor | None,
    ) -> tuple[Tensor, Tensor, RoutedTokens]:
        normed, total = self.sum_and_norm(source)
        scores = self.linear(normed, router, bias)
        return normed, total, self.experts.route(scores, routing, query_start_loc, loads)

    def int4_linear(self, x: Tensor, matrix: Int4Matrix, bias: Tensor | None) -> Tensor:
        return functional.linear(x, matrix.dequantized(x.dtype), bias)

    def sum_and_norm(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        part, residual, norm, part_norm = source
        if part is None:
            return self.rms_norm(residual, norm), residual
        if part_norm is not None:
            part = self.rms_norm(part, part_norm)
        total = residual + part
        return self.rms_norm(total, norm), total

    def adapted_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapters: AdapterWeights,
        token_slots: Tensor,
    ) -> Tensor:
        y = self.linear(x, weight, bias)
        self.add_adapters(y, x, adapters, token_slots)
        return y

    def add_adapters(
        self, y: Tensor, x: Tensor, adapters: AdapterWeights, token_slots: Tensor
    ) -> None:
        a, b, ends = adapters
        rank = b.shape[2]
        y[token_slots < 0] = torch.nan
        for slot in range(a.shape[0]):
            rows = (token_slots == slot + 1).nonzero().squeeze(1)
            if not rows.numel():
                continue
            shrunk = x[rows].float() @ a[slot].float().T
            starts = (0, *ends[:-1])
            parts = [
                shrunk[:, index * rank : (index + 1) * rank] @ b[slot, start:end].float().T
                for index, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
            y[rows] = (y[rows].float() + torch.cat(parts, dim=1)).to(y.dtype)

    def adapted_gated_linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        adapters: AdapterWeights,
        token_slots: Tensor,
        activation: Activation,
    ) -> Tensor:
        gate_up = self.adapted_linear(x, weight, bias, adapters, token_slots)
        return self.act_and_mul(gate_up, activation)

    def span_means(self, qkv: Tensor, norms: SpanNorms, num_ranks: int) -> Tensor:
        spans = _spans(qkv, norms)
        return torch.stack([span.float().square().mean(1) for span in spans], 1) / num_ranks

    def norm_spans(self, qkv: Tensor, norms: SpanNorms, means: Tensor | None = None) -> Tensor:
        means = self.span_means(qkv, norms, 1) if means is None else means
        scales = torch.rsqrt(means + norms.eps)
        sizes = [norms.query_size, norms.weight.shape[0] - norms.query_size]
        weights = torch.split(norms.weight.float(), sizes)
        for index, (span, weight) in enumerate(zip(_spans(qkv, norms), weights, strict=True)):
            span.copy_(span.float() * scales[:, index, None] * weight)
        return qkv

    def act_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return _activate(gate, activation) * up

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, eps, offset = norm
        if not offset:
            return functional.rms_norm(x, weight.shape, weight, eps)
        gain = weight.float() + offset
        return functional.rms_norm(x.float(), weight.shape, gain, eps).to(x.dtype)

    def rms_norm_add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        return residual + self.rms_norm(x, norm)

    def greedy_tokens(self, logits: Tensor, vocab_size: int) -> Tensor:
        return likeliest(logits[:, :vocab_size])

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary_table: Tensor,
        num_kv_heads: int,
        head_dim: int,
        head_norms: HeadNorms | None,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_scales: KVScales | None = None,
        *,
        interleaved: bool = False,
    ) -> Tensor:
        num_heads = qkv.shape[1] // head_dim
        heads = qkv.view(-1, num_heads, head_dim)
        num_q_heads = num_heads - 2 * num_kv_heads
        q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
        if head_norms is not None:
            q_weight, k_weight = head_norms.weight
            q = self.rms_norm(q, Norm(q_weight, head_norms.eps, head_norms.weight_offset))
            k = self.rms_norm(k, Norm(k_weight, head_norms.eps, head_norms.weight_offset))
        cos, sin = rotary_table[positions].unsqueeze(2).unbind(1)
        if kv_cache.numel():
            k = rotate(k, cos, sin, interleaved=interleaved)
            if kv_scales is not None:
                of_keys, of_values = kv_scales.values
                k, v = quantize(k, of_keys), quantize(v, of_values)
            _write_kv(k, v, kv_cache, slot_mapping)
        return rotate(q, cos, sin, interleaved=interleaved)


class DequantizingOps:
    """Fp8Ops that dequantize the matrix at each use."""

    def __init__(self, ops: TorchOps) -> None:
        self._ops = ops

    def linear(self, x: Tensor | GateUp, matrix: Fp8Matrix, bias: Tensor | None) -> Tensor:
        x = activated(x, self._ops)
        return self._ops.linear(x, matrix.dequantized(x.dtype), bias)

    def gated_linear(
        self, x: Tensor, matrix: Fp8Matrix, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        return self._ops.gated_linear(x, matrix.dequantized(x.dtype), bias, activation)

    def norm_linear(
        self, source: NormedSum, matrix: Fp8Matrix, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._ops.norm_linear(source, matrix.dequantized(source.residual.dtype), bias)

    def norm_gated_linear(
        self, source: NormedSum, matrix: Fp8Matrix, bias: Tensor | None, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        weight = matrix.dequantized(source.residual.dtype)
        return self._ops.norm_gated_linear(source, weight, bias, activation)


def _activate(gate: Tensor, activation: Activation) -> Tensor:
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    return functional.silu(gate)


def _spans(qkv: Tensor, norms: SpanNorms) -> tuple[Tensor, Tensor]:
    """Return the queries and the keys of qkv, views."""
    end = norms.weight.shape[0]
    return qkv[:, : norms.query_size], qkv[:, norms.query_size : end]


def likeliest(logits: Tensor) -> Tensor:
    """logits [R, V] -> int64 [R]: as LayerOps.greedy_tokens."""
    token_ids = logits.argmax(dim=-1)  # the index of a NaN, if there is one
    largest = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return token_ids.masked_fill(~largest.isfinite(), NO_TOKEN)


def _write_kv(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """slot_mapping entries are not negative here: padding points into block 0."""
    block_size = kv_cache.shape[2]
    block_ids = slot_mapping // block_size
    offsets = slot_mapping % block_size
    kv_cache[block_ids, 0, offsets] = k
    kv_cache[block_ids, 1, offsets] = v
