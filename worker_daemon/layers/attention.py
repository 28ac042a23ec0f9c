"""The attention layer, and the interface of whatever computes attention over the paged KV cache.

Shapes: N tokens in the step, B sequences, Hq query heads and Hkv KV heads of this rank, D head_dim.
A layer's cache is [num_blocks, 2, block_size, Hkv, D], index 0 of dim 1 being K; block 0 is the
null block, which no sequence owns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    RowShard,
    even_shard,
)
from worker_daemon.layers.norm import QueryKeyNorm
from worker_daemon.layers.ops import HeadNorms, LayerOps
from worker_daemon.layers.parameter import Parameter


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's sequences. Tokens lie sequence after sequence. Layers of different groups differ in
    block_table and slot_mapping alone."""

    query_start_loc: Tensor
    """int32 [B + 1], device: sequence b owns tokens from entry b up to entry b + 1."""
    seq_lens: Tensor
    """int32 [B], device: context length, this step's tokens included."""
    seq_order: Tensor
    """int32 [B], device: the sequences in the order in which work on them best starts."""
    block_table: Tensor
    """int32 [rows, max_blocks], device: block ids of each request row in order."""
    seq_rows: Tensor
    """int32 [B], device: the row of the block table that each sequence has."""
    slot_mapping: Tensor
    """int64 [N], device: block_id * block_size + offset; padding points into block 0."""
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    """An upper bound of seq_lens, on which the choice of launches may depend."""
    query_lens_np: npt.NDArray[np.int32]
    """int32 [B], host: this step's tokens of each sequence."""
    seq_lens_np: npt.NDArray[np.int32]
    """int32 [B], host copy of seq_lens."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How a layer's projection becomes queries, keys and values: LayerOps.rotate_and_store, with
    what it takes of the layer and the step."""

    ops: LayerOps
    positions: Tensor
    rotary_table: Tensor
    num_kv_heads: int
    head_norms: HeadNorms | None

    def rotate_and_store(self, qkv: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        """qkv [N, (Hq + 2 Hkv) D], which may be overwritten -> q [N, Hq, D]."""
        return self.ops.rotate_and_store(
            qkv,
            self.positions,
            self.rotary_table,
            self.num_kv_heads,
            self.head_norms,
            kv_cache,
            slot_mapping,
        )


class AttentionBackend(Protocol):
    """Computes attention for one layer. One object serves every layer: it keeps nothing but what
    the layers of one step share."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """q [N, Hq, D], any strides with the last dimension contiguous -> [N, Hq, D]; this step's
        keys and values are in kv_cache already.

        A query at position p sees keys at positions p - window + 1 to p (all up to p without a
        window); blocks that no query of a sequence sees may hold anything, NaN too. Tokens
        behind the last sequence are padding; their output is finite and otherwise unspecified.
        Never waits for the device.
        """

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """rotation.rotate_and_store, then attend with what that returns, or both in one kernel: qkv
        [N, (Hq + 2 Hkv) D], which may be overwritten -> [N, Hq, D].

        No sequence may see in its blocks what another one stores in this same step; behind its
        window its row may name any block. What block 0 holds afterwards is unspecified.
        """


class NullAttention:
    """Stands in while there is no KV cache, as in the memory profile: zeros."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return torch.zeros_like(q)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        rotation: Rotation,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        q = rotation.rotate_and_store(qkv, kv_cache, metadata.slot_mapping)
        return self.attend(q, kv_cache, metadata, scale, window)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    positions: Tensor
    """int32 or int64 [N], each below P"""
    rotary_table: Tensor
    """float32 [P, 2, D / 2]: cos, then sin"""
    metadata: AttentionMetadata
    backend: AttentionBackend
    ops: LayerOps


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """What one local layer needs of the KV cache."""

    name: str
    """Checkpoint prefix of the layer's attention."""
    num_kv_heads: int
    """KV heads on this rank."""
    head_dim: int
    window: int | None
    """Sliding window in tokens; None keeps everything."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes and switches of an attention layer, before tensor parallelism splits it."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    o_bias: bool
    qk_norm_eps: float | None
    """Epsilon of the norm on each query and key head; None where the model has no such norm."""
    window: int | None
    """Sliding window in tokens; None attends to everything."""


class Attention:
    """qkv projection, optional head norms, rotation, attention by the backend, output projection.
    The first is called by whoever has its input.

    Query heads are split evenly. KV heads are split where the group's size divides their number; a
    larger group holds each KV head on size / num_kv_heads neighbouring ranks.
    """

    def __init__(
        self,
        prefix: str,
        shape: AttentionShape,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = shape.window
        self.head_dim = shape.head_dim
        self.num_kv_heads = max(1, shape.num_kv_heads // tp.size)
        self._scale = shape.head_dim**-0.5
        self.qkv = ColumnParallelLinear(
            f"{prefix}.qkv_proj",
            _qkv_shards(prefix, shape, self.num_kv_heads, tp),
            shape.hidden_size,
            bias=shape.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self._out = RowParallelLinear(
            f"{prefix}.o_proj",
            shape.num_heads * shape.head_dim,
            shape.hidden_size,
            bias=shape.o_bias,
            tp=tp,
            dtype=dtype,
            device=device,
        )
        self._head_norm = (
            None
            if shape.qk_norm_eps is None
            else QueryKeyNorm(prefix, shape.head_dim, shape.qk_norm_eps, dtype=dtype, device=device)
        )

    def forward(self, qkv: Tensor, kv_cache: Tensor, context: ForwardContext) -> Tensor:
        """What self.qkv computed, [N, (Hq + 2 Hkv) D], which may be overwritten -> [N, H], this
        rank's part of the sum; writes k and v into kv_cache, unless that is empty."""
        attended = context.backend.rotate_and_attend(
            qkv,
            Rotation(
                context.ops,
                context.positions,
                context.rotary_table,
                self.num_kv_heads,
                None if self._head_norm is None else self._head_norm.weights,
            ),
            kv_cache,
            context.metadata,
            self._scale,
            self.window,
        )
        return self._out.forward(attended.flatten(1), context.ops)

    def parameters(self) -> Iterator[Parameter]:
        yield from self.qkv.parameters()
        if self._head_norm is not None:
            yield from self._head_norm.parameters()
        yield from self._out.parameters()


def _qkv_shards(
    prefix: str, shape: AttentionShape, num_kv_heads: int, tp: TensorParallel
) -> list[RowShard]:
    first_kv_head = tp.rank * shape.num_kv_heads // tp.size
    total, start, rows = (
        heads * shape.head_dim for heads in (shape.num_kv_heads, first_kv_head, num_kv_heads)
    )
    return [
        even_shard(f"{prefix}.q_proj", shape.num_heads * shape.head_dim, tp),
        RowShard(f"{prefix}.k_proj", total, start, rows),
        RowShard(f"{prefix}.v_proj", total, start, rows),
    ]
