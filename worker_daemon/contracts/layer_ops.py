"""What a layer computes beside attention, as operations that a device may fuse. Knows no parameter
and no parallelism.

Shapes: N tokens, H hidden size, I inner size of the MLP, Hq / Hkv query and KV heads of this rank,
D head_dim, P positions.
"""

from typing import Final, NamedTuple, Protocol

from torch import Tensor

NO_TOKEN: Final = -1
"""Chosen in place of a token where a row's logits are no numbers to choose by: one of them is NaN,
or the largest is infinite."""


class HeadNorms(Protocol):
    """The norm on each query and key head."""

    @property
    def weight(self) -> Tensor:
        """[2, D], contiguous: the queries' weights, then the keys'."""

    @property
    def eps(self) -> float:
        """Added to the mean of squares."""


class NormedSum(NamedTuple):
    """A norm of the residual stream that is still to be computed: rms_norm(s, weight, eps) with
    s = residual + part, rounded to the model's dtype before the norm."""

    part: Tensor | None
    """[N, H]; None adds nothing."""
    residual: Tensor
    """[N, H]"""
    weight: Tensor
    """[H]"""
    eps: float


class LayerOps(Protocol):
    """One stateless object serves every layer. All tensors are contiguous and of the model's dtype
    unless said otherwise; results are new, arguments stay as they are, unless said otherwise. Never
    waits for the device."""

    @property
    def name(self) -> str:
        """As a daemon reports it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b: x [N, K], weight [M, K], bias [M] -> [N, M]."""

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up, (gate, up) = linear(x, weight, bias): weight [2 I, K], the gate's rows
        first -> [N, I]."""

    def norm_linear(
        self, source: NormedSum, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(linear(n, weight, bias), s) with s the sum of source, n its norm, which need not be
        rounded here. Without a part, s is source's residual itself."""

    def norm_gated_linear(
        self, source: NormedSum, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As norm_linear, with gated_linear in place of linear."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over H, in float32, rounded once: x [N, H], weight
        [H] -> [N, H]."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(s), s) with s = residual + x, rounded to the model's dtype before the norm; all
        [N, H]."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: gate_up [N, 2 I], gate first -> [N, I]."""

    def greedy_tokens(self, logits: Tensor, vocab_size: int) -> Tensor:
        """logits [R, >= vocab_size], rows contiguous -> int64 [R]: the id below vocab_size of each
        row's largest logit, the lowest among equals; NO_TOKEN where one of the row's is NaN or the
        largest is infinite."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        rotary_table: Tensor,
        num_kv_heads: int,
        head_norms: HeadNorms | None,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> Tensor:
        """Norms the q and k heads where asked, rotates them by `rotary_table` (rotary.py), stores k
        and v, returns q [N, Hq, D].

        qkv [N, (Hq + 2 Hkv) D] may be overwritten, and q may be a view of it. positions [N] is
        integer, rotary_table float32 [P, 2, D / 2]. kv_cache [num_blocks, 2, block_size, Hkv, D]
        is empty where there is none yet: then nothing is stored. slot_mapping [N] is integer:
        block_id * block_size + offset.
        """
