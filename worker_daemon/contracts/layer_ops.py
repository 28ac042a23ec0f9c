"""The operations of a layer besides attention, which a device may fuse.

Shapes: N tokens, H hidden size, I inner size of the MLP, Hq / Hkv query and KV heads of this rank,
D head_dim, R its rotated elements, P positions.
"""

from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from worker_daemon.contracts.experts import ExpertOps, RoutedTokens, Routing
from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.int4 import Int4Matrix
from worker_daemon.contracts.kv_scales import KVScales

NO_TOKEN: Final = -1
"""Returned instead of a token if one of a row's logits is NaN, or the largest is infinite."""


Activation: TypeAlias = Literal["silu", "gelu_tanh"]
"""The function of a gated MLP's gate. gelu_tanh: GELU with tanh in place of the error function
(Hendrycks and Gimpel, 2016), like torch's gelu(approximate="tanh")."""


class Norm(NamedTuple):
    """A root-mean-square norm: x / sqrt(mean(x^2) + eps) * (weight_offset + weight), in float32,
    rounded once."""

    weight: Tensor
    """[H], as in the checkpoint."""
    eps: float
    """Added to the mean of squares."""
    weight_offset: float = 0.0
    """Added to the weight in float32."""


class HeadNorms(Protocol):
    """The norm on each query and key head: see Norm."""

    @property
    def weight(self) -> Tensor:
        """Weights [2, D], contiguous: the queries', then the keys'."""

    @property
    def eps(self) -> float:
        """Added to the mean of squares."""

    @property
    def weight_offset(self) -> float:
        """Added to the weights in float32."""


class SpanNorms(NamedTuple):
    """The norm over all queries of a token together, and over all its keys: x / sqrt(mean(x^2) +
    eps) * weight, in float32, rounded once."""

    weight: Tensor
    """[(Hq + Hkv) D]: the queries', then the keys'."""
    eps: float
    query_size: int
    """Hq D"""


class NormedSum(NamedTuple):
    """A norm of the residual stream that has not been computed yet: that of residual + part,
    rounded to the model's dtype before the norm."""

    part: Tensor | None
    """[N, H]; None adds nothing."""
    residual: Tensor
    """[N, H]"""
    norm: Norm
    part_norm: Norm | None = None
    """Replaces the part by its norm, rounded to the model's dtype before the addition."""


class GateUp(NamedTuple):
    """activation(gate) * up that has not been computed yet."""

    values: Tensor
    """[N, 2 I], the gate's columns first."""
    activation: Activation


class AdapterWeights(NamedTuple):
    """LoRA adapters in L slots for a matrix merged from G matrices: B (A x) is added to its
    product. Ranks below r are zero-padded."""

    a: Tensor
    """[L, G * r, K], contiguous except in the first dimension."""
    b: Tensor
    """[L, M, r], scaled; contiguous like a."""
    ends: tuple[int, ...]
    """For each of the G matrices, the end of its rows among the M."""


class RowAdapters(NamedTuple):
    """A matrix's adapters, and which of them each row uses. Sums and A x are in float32."""

    weights: AdapterWeights
    token_slots: Tensor
    """int32 [N]: 0 adds nothing and leaves the row's bits, s + 1 adds the adapter of slot s, and a
    negative one makes the row NaN."""


class Fp8Matrix(NamedTuple):
    """A matrix W [M, K] in FP8: values times scales."""

    weight: Tensor
    """float8_e4m3fn [M, K]"""
    scale: Tensor
    """float32 [M], a scale for each row; or [ceil(M / 128), ceil(K / 128)], one for each block of
    128 x 128 values."""
    input_scale: Tensor | None
    """float32 [G], of the G matrices merged into one; the largest quantizes all inputs. Only with
    static activations."""
    activations: Literal["none", "dynamic", "static"]
    """Permitted quantization of inputs: none, by a scale for each token, or by input_scale. Inputs
    that are not quantized give more exact products."""

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return values times scales [M, K], multiplied in float32 and rounded once to dtype."""
        values = self.weight.to(dtype)  # exact
        if self.scale.dim() == 1:
            _multiply(values, self.scale.unsqueeze(1))
            return values
        num_rows, num_columns = self.weight.shape
        scale = self.scale.repeat_interleave(FP8_BLOCK, 0)[:num_rows].unsqueeze(2)
        num_whole = num_columns // FP8_BLOCK
        blocks = values[:, : num_whole * FP8_BLOCK].view(num_rows, num_whole, FP8_BLOCK)
        _multiply(blocks, scale[:, :num_whole])
        if num_columns % FP8_BLOCK:
            _multiply(values[:, num_whole * FP8_BLOCK :], scale[:, -1])
        return values


def _multiply(values: Tensor, scale: Tensor) -> None:
    """Multiply in place; torch computes in the wider dtype, here float32."""
    torch.mul(values, scale, out=values)


Source: TypeAlias = Tensor | NormedSum | GateUp
"""The inputs of a product, [N, K]: a tensor, or what computes it."""

Matrix: TypeAlias = Tensor | Fp8Matrix | Int4Matrix
"""A matrix W [M, K] in one of the formats; a tensor has the model's dtype."""


class Epilogue(NamedTuple):
    """The steps behind a product's sums, in the order of the fields."""

    bias: Tensor | None = None
    """[M]"""
    adapters: RowAdapters | None = None
    """Adds B (A x) by each row's adapter; None adds nothing."""
    activation: Activation | None = None
    """The rows of W are gate and up, the gate's first: activation(gate) * up, [N, M / 2]."""
    out: Tensor | None = None
    """[N, M], receives and is the result; only of a matrix in the model's dtype, without the other
    fields."""
    is_separate: bool = False
    """Norm and activation are separate kernels, although there are no adapters: rows without
    one keep the bits that they have beside rows with one."""


class LayerOps(Protocol):
    """The operations of a layer besides attention. One stateless object serves every layer. All
    tensors are contiguous and of the model's dtype, results are new, and arguments are unchanged,
    unless stated otherwise. Never waits for the device."""

    @property
    def name(self) -> str:
        """The name that a daemon reports."""

    @property
    def experts(self) -> ExpertOps:
        """The routing and the products of experts."""

    def product(
        self, source: Source, matrix: Matrix, epilogue: Epilogue
    ) -> tuple[Tensor | GateUp, Tensor]:
        """Return (x W^T + b, s): x [N, K] of source, W [M, K], b and more by epilogue -> [N, M], or
        [N, M / 2] with an activation, which may be left to the next product as a GateUp. s is the
        sum of a NormedSum, whose norm need not be rounded before the product; of other sources
        their own tensor."""

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
        """Return (x, s, experts.route(x router^T + bias, ...)) with x and s [N, H] of source, see
        computed: router [E, H], bias [E]; the rest as for ExpertOps.route. Scores are rounded to
        the model's dtype."""

    def sum_and_norm(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """Return (n, s) with the norm n and the sum s of source; without a part, s is source's
        residual itself."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of each row: x [N, H] -> [N, H]."""

    def rms_norm_add(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """residual + rms_norm(x), the norm rounded to the model's dtype before the addition; all
        [N, H]."""

    def act_and_mul(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up: gate_up [N, 2 I], gate first -> [N, I]."""

    def greedy_tokens(self, logits: Tensor, vocab_size: int) -> Tensor:
        """logits [R, >= vocab_size], rows contiguous -> int64 [R]: the id below vocab_size of each
        row's largest logit, the lowest among equals; NO_TOKEN if one of the row's logits is NaN or
        the largest is infinite."""

    def span_means(self, qkv: Tensor, norms: SpanNorms, num_ranks: int) -> Tensor:
        """Return this rank's shares of the means of squares, float32 [N, 2], of queries and of
        keys: their sum over the ranks are the means over the model. qkv [N, (Hq + 2 Hkv) D]."""

    def norm_spans(self, qkv: Tensor, norms: SpanNorms, means: Tensor | None = None) -> Tensor:
        """Return qkv [N, (Hq + 2 Hkv) D] with normed queries and keys; may overwrite it. means: see
        span_means, summed over the ranks; None if this rank has all heads."""

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
        """Norm the q and k heads if asked, rotate them by `rotary_table` (rotary.py), store k and
        v, and return q [N, Hq, D].

        qkv [N, (Hq + 2 Hkv) D] may be overwritten, and q may be a view of it. positions [N] is
        integer, rotary_table float32 [P, 2, R / 2]: the first R elements of a head are rotated,
        which pairs i with i + R / 2 or, if interleaved, 2 i with 2 i + 1. kv_cache [num_blocks, 2,
        block_size, Hkv, D] is empty if there is none yet; then nothing is stored. slot_mapping [N]
        is integer: block_id * block_size + offset. kv_scales: of a kv_cache in FP8, which stores k
        and v rounded to qkv's dtype, divided by their head's scale in float32 (or times its
        reciprocal), then limited and rounded to FP8.
        """


def computed(source: Source, ops: LayerOps) -> tuple[Tensor, Tensor]:
    """Return (x, s): the inputs x [N, K] of source, computed if they have not been yet, and s as
    LayerOps.product does."""
    if isinstance(source, NormedSum):
        return ops.sum_and_norm(source)
    if isinstance(source, GateUp):
        return ops.act_and_mul(*source), source.values
    return source, source
