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
    Epilogue,
    HeadNorms,
    Matrix,
    Norm,
    NormedSum,
    RowAdapters,
    Source,
    SpanNorms,
    computed,
)
from worker_daemon.layers.fp8_cache import quantize
from worker_daemon.layers.rotary import rotate
from worker_daemon.layers.torch_experts import TorchExperts


class TorchOps:
    """LayerOps on any device."""

    name = "torch"

    def __init__(self) -> None:
        self.experts = TorchExperts()

    def product(self, source: Source, matrix: Matrix, epilogue: Epilogue) -> tuple[Tensor, Tensor]:
        bias, adapters, activation, out, _ = epilogue
        x, total = computed(source, self)
        y = _multiply(x, matrix, bias, out)
        if adapters is not None:
            _add_adapters(y, x, adapters)
        return (y if activation is None else self.act_and_mul(y, activation)), total

    def route(
        self,
        source: Tensor | NormedSum,
        router: Tensor,
        bias: Tensor | None,
        routing: Routing,
        query_start_loc: Tensor,
        loads: Tensor | None,
        replayed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, RoutedTokens]:
        x, total = computed(source, self)
        scores = functional.linear(x, router, bias)
        return x, total, self.experts.route(scores, routing, query_start_loc, loads, replayed)

    def sum_and_norm(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        part, residual, norm, part_norm = source
        if part is None:
            return self.rms_norm(residual, norm), residual
        if part_norm is not None:
            part = self.rms_norm(part, part_norm)
        total = residual + part
        return self.rms_norm(total, norm), total

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


def _multiply(x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """Return x W^T + b; a quantized matrix is dequantized at each use."""
    if isinstance(matrix, Int4Matrix):
        x = matrix.ordered(x)
    weight = matrix if isinstance(matrix, Tensor) else matrix.dequantized(x.dtype)
    if out is None:
        return functional.linear(x, weight, bias)
    assert bias is None
    return torch.mm(x, weight.t(), out=out)


def _add_adapters(y: Tensor, x: Tensor, adapters: RowAdapters) -> None:
    (a, b, ends), token_slots = adapters
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
