"""The inputs of attention from a layer and a step, and the interface of its implementations over
the paged KV cache.

Shapes: N tokens in the step, B sequences, Hq query heads and Hkv KV heads of this rank, D head_dim,
P positions. A layer's cache is [num_blocks, 2, block_size, Hkv, D], index 0 of dim 1 being K; block
0 is the null block, which no sequence owns. The cache has the model's dtype or, with scales, is in
FP8 (fp8.py).
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.contracts.layer_ops import HeadNorms, LayerOps

ContextT = TypeVar("ContextT")
"""A copy of keys and values: see GatheredAttention."""


class StateSlots(NamedTuple):
    """Places of a step's sequences in the states [S + 1 + C, *shape] of a layer: S request rows,
    the spare one, and C checkpoints."""

    sources: Tensor
    """int64 [B], device: the state with which the sequence continues, unless it begins at position
    0: its row's, or the checkpoint of the border at which it begins."""
    targets: Tensor
    """int64 [B], device: the checkpoint that takes a copy of the state after the step. It is the
    first one, which nobody reads, if the sequence ends at no border or has no tokens."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A step's sequences. Tokens are ordered by sequence, with padding at the end. Layers of
    different KV groups differ only in block_table and slot_mapping."""

    query_start_loc: Tensor
    """int32 [B + 1], device: sequence b has tokens [entry b, entry b + 1), possibly none."""
    seq_lens: Tensor
    """int32 [B], device: context length, this step's tokens included."""
    seq_order: Tensor
    """int32 [B], device: the order in which to start the sequences."""
    block_table: Tensor
    """int32 [rows, max_blocks], device, rows contiguous: block ids of each request row in order."""
    seq_rows: Tensor
    """int32 [B], device: each sequence's row of the block table."""
    slot_mapping: Tensor
    """int32 or int64 [N], device: block_id * block_size + offset; padding points into block 0."""
    num_seqs: int
    max_query_len: int
    """An upper bound on a sequence's query tokens."""
    max_seq_len: int
    """An upper bound on seq_lens, which may affect the choice of launches."""
    query_lens_np: npt.NDArray[np.int32]
    """int32 [B], host: this step's tokens of each sequence."""
    seq_lens_np: npt.NDArray[np.int32]
    """int32 [B], host: seq_lens, or an upper bound for a sequence that has sampled before."""
    state_slots: StateSlots | None = None
    """None if there are no checkpoints of states."""
    divisions: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Divisions of the step's work that an implementation makes at its first use in a forward pass,
    for all layers with the same key."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Inputs of a layer's attention that layers of one KV group and one rotation share in a forward
    pass."""

    positions: Tensor
    """int32 or int64 [N], each below P."""
    rotary_table: Tensor
    """float32 [P, 2, R / 2], contiguous: cos, then sin. R, the rotated elements of a head, is at
    most D. Layers without a rotation do not read it."""
    metadata: AttentionMetadata


class AttentionSinks(Protocol):
    """A layer's learned logits that join the denominator of each query's softmax, as a key with a
    value of zero would (Xiao et al., 2023; GPT-OSS)."""

    @property
    def values(self) -> Tensor:
        """[Hq], contiguous, of the model's dtype: a logit for each query head, which is neither
        scaled nor capped. Its address does not change."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """A layer's conversion of its projection into queries, keys and values, and its softmax. Made
    once per layer."""

    ops: LayerOps
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, above 0."""
    window: int | None
    """Number of keys that a query sees, its own included; None for all up to its own."""
    norms: HeadNorms | None
    """Applied before the rotation."""
    kv_scales: KVScales | None = None
    """The scales of a cache in FP8; None if the cache has the model's dtype."""
    interleaved: bool = False
    """The rotation pairs elements (2 i, 2 i + 1) of a head, not (i, i + R / 2)."""
    logit_softcap: float | None = None
    """The cap of the scaled scores, above 0: score = cap * tanh(score / cap), before the mask. None
    does not cap."""
    sinks: AttentionSinks | None = None

    def rotate_and_store(self, qkv: Tensor, kv_cache: Tensor, step: AttentionStep) -> Tensor:
        """qkv [N, (Hq + 2 Hkv) D], which may be overwritten -> q [N, Hq, D], as
        LayerOps.rotate_and_store."""
        return self.ops.rotate_and_store(
            qkv,
            step.positions,
            step.rotary_table,
            self.num_kv_heads,
            self.head_dim,
            self.norms,
            kv_cache,
            step.metadata.slot_mapping,
            self.kv_scales,
            interleaved=self.interleaved,
        )


class AttentionBackend(Protocol):
    """Computes attention. One object serves every layer and keeps only what the layers of one step
    share."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return attention [N, Hq, D] of q [N, Hq, D], whose last dimension is contiguous. kv_cache
        already has this step's keys and values.

        A query at position p sees keys at positions p - window + 1 to p (all up to p without a
        window); blocks that no query of a sequence sees may hold anything, even NaN. Tokens after
        the last sequence are padding; their output is finite and otherwise unspecified. Never waits
        for the device.

        lse: float32 [N, Hq], contiguous; receives each query's log-sum-exp: the natural logarithm
        of the sum of exp(score) over the keys that it sees, and over its sink if the layer has
        sinks. Scores are scaled and capped. With lse, a sequence may have fewer keys than query
        tokens, even none; the first of these then see no key. A query without a key has the output
        0, and the log-sum-exp -inf, or its sink. Padding has -inf.
        """

    def rotate_and_attend(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Call layer.rotate_and_store, then attend with its result, or do both in one kernel: qkv
        [N, (Hq + 2 Hkv) D], which may be overwritten -> [N, Hq, D]. lse: see attend.

        The blocks of a sequence must not contain tokens that another one stores in the same step.
        Behind a sequence's window, its block table row may name any block. The content of block 0
        is unspecified afterwards.
        """

    def merge(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Merge attention over P >= 1 parts of the keys into attention over all of them: outs [P,
        N, Hq, D] and lses float32 [P, N, Hq] of attend, contiguous -> (out [N, Hq, D] of the same
        dtype, lse float32 [N, Hq]), summed in float32.

        No two parts may have the same key. Sinks, like a key, belong to one part only: compute the
        others without them (replace(layer, sinks=None)), or compute all without them and add the
        part with outputs 0 and the sinks as its log-sum-exps. A part with -inf has weight 0; its
        output must be finite. If all have -inf, the output is 0 and lse -inf. Never waits for the
        device.
        """


class KeyRange(NamedTuple):
    """Consecutive positions of one sequence."""

    seq: int
    """Its index in the step's metadata."""
    first: int
    end: int
    """One past the last position."""
    num_rows: int
    """R, at least end - first: the rows that are wanted for them."""


class GatheredAttention(Protocol[ContextT]):
    """Computes attention of one sequence over a copy of its keys and values in contiguous memory.

    ContextT: the copy. A Tensor is the keys, then the values, [2, R, Hkv, D], contiguous, in the
    dtype that was asked for; those of a cache in FP8 times their scales.
    """

    def gather(
        self,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        keys: KeyRange,
        dtype: torch.dtype,
    ) -> ContextT:
        """Return the keys and values of a range, and 0 for the rows after it. Never waits for the
        device."""

    def attend(
        self,
        q: Tensor,
        context: ContextT,
        layer: AttentionLayer,
        window: int | None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Return attention [L, Hq, D] of q [L, Hq, D], whose last dimension is contiguous, at the
        last L of the R >= L positions of context, a result of gather without rows after its
        range. See AttentionBackend.attend for what a query sees, with `window` in place of the
        layer's, and for lse, here [L, Hq]."""
