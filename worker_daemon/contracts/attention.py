"""What attention takes of a layer and of a step, and the interface of whatever computes it over the
paged KV cache.

Shapes: N tokens in the step, B sequences, Hq query heads and Hkv KV heads of this rank, D head_dim,
P positions. A layer's cache is [num_blocks, 2, block_size, Hkv, D], index 0 of dim 1 being K; block
0 is the null block, which no sequence owns.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from worker_daemon.contracts.layer_ops import HeadNorms, LayerOps


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's sequences. Tokens lie sequence after sequence, padding behind them. Layers of
    different groups differ in block_table and slot_mapping alone."""

    query_start_loc: Tensor
    """int32 [B + 1], device: sequence b owns tokens from entry b up to entry b + 1, which may be
    none."""
    seq_lens: Tensor
    """int32 [B], device: context length, this step's tokens included."""
    seq_order: Tensor
    """int32 [B], device: the sequences in the order in which work on them best starts."""
    block_table: Tensor
    """int32 [rows, max_blocks], device, rows contiguous: block ids of each request row in order."""
    seq_rows: Tensor
    """int32 [B], device: the row of the block table that each sequence has."""
    slot_mapping: Tensor
    """int32 or int64 [N], device: block_id * block_size + offset; padding points into block 0."""
    num_seqs: int
    max_query_len: int
    """An upper bound of a sequence's query tokens."""
    max_seq_len: int
    """An upper bound of seq_lens, on which the choice of launches may depend."""
    query_lens_np: npt.NDArray[np.int32]
    """int32 [B], host: this step's tokens of each sequence."""
    seq_lens_np: npt.NDArray[np.int32]
    """int32 [B], host: seq_lens, or an upper bound of a sequence that has sampled before."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """What the attention of all layers shares in one forward pass."""

    positions: Tensor
    """int32 or int64 [N], each below P."""
    rotary_table: Tensor
    """float32 [P, 2, D / 2], contiguous: cos, then sin."""
    metadata: AttentionMetadata


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """How a layer's projection becomes queries, keys and values, and what these attend to. Made
    once a layer."""

    ops: LayerOps
    num_kv_heads: int
    scale: float
    """Factor of the scores, above 0."""
    window: int | None
    """Keys that a query sees, its own included; None sees all up to its own."""
    norms: HeadNorms | None
    """Applied before the rotation."""

    def rotate_and_store(self, qkv: Tensor, kv_cache: Tensor, step: AttentionStep) -> Tensor:
        """qkv [N, (Hq + 2 Hkv) D], which may be overwritten -> q [N, Hq, D], as
        LayerOps.rotate_and_store."""
        return self.ops.rotate_and_store(
            qkv,
            step.positions,
            step.rotary_table,
            self.num_kv_heads,
            self.norms,
            kv_cache,
            step.metadata.slot_mapping,
        )


class AttentionBackend(Protocol):
    """Computes attention. One object serves every layer: it keeps nothing but what the layers of
    one step share."""

    def attend(
        self, q: Tensor, kv_cache: Tensor, layer: AttentionLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """q [N, Hq, D], any strides with the last dimension contiguous -> [N, Hq, D]; this step's
        keys and values are in kv_cache already.

        A query at position p sees keys at positions p - window + 1 to p (all up to p without a
        window); blocks that no query of a sequence sees may hold anything, NaN too. Tokens behind
        the last sequence are padding; their output is finite and otherwise unspecified. Never
        waits for the device.
        """

    def rotate_and_attend(
        self, qkv: Tensor, kv_cache: Tensor, layer: AttentionLayer, step: AttentionStep
    ) -> Tensor:
        """layer.rotate_and_store, then attend with what that returns, or both in one kernel: qkv
        [N, (Hq + 2 Hkv) D], which may be overwritten -> [N, Hq, D].

        No sequence may see in its blocks what another one stores in this same step; behind its
        window its row may name any block. What block 0 holds afterwards is unspecified.
        """
