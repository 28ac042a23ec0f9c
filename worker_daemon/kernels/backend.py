"""The attention provider for GPUs: writes a step's keys and values, then attends.

Must not know layers or models: what it needs of a step is the protocol below.
"""

from __future__ import annotations

from typing import Protocol

import torch

from worker_daemon.kernels.kv_write import write_kv
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.tiles import DeviceLimits


class AttentionMetadata(Protocol):
    """What a step says about its N tokens and B sequences; its tensors are on the device."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[N] int64: each token's slot in the cache; negative = padding."""

    @property
    def block_table(self) -> torch.Tensor:
        """[>= B, max_blocks] int32."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[B + 1] int32: where each sequence's tokens start, then the number of real tokens."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[>= B] int32: keys of each sequence, this step's tokens included."""

    @property
    def num_seqs(self) -> int:
        """B."""

    @property
    def max_query_len(self) -> int:
        """An upper bound of the tokens a sequence has in this step."""

    @property
    def max_seq_len(self) -> int:
        """An upper bound of seq_lens."""


class TritonAttention:
    """Our Triton kernels, one object for all layers. Owns no device memory; step thread only."""

    def __init__(self, device: torch.device) -> None:
        """device is the one whose tensors forward will get."""
        self._limits = DeviceLimits.of(device)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Store k and v [N, Hkv, D] in kv_cache, then attend with q [N, Hq, D].

        q, k and v may be slices of one projection; kv_cache is [num_blocks, 2, block_size, Hkv, D]
        of their dtype. Returns [N, Hq, D], contiguous, 0 in the rows of padding. scale and window
        are paged_attention's.
        """
        write_kv(k, v, kv_cache, metadata.slot_mapping)
        return paged_attention(
            q,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            num_seqs=metadata.num_seqs,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            scale=scale,
            window=window,
            limits=self._limits,
        )
