"""The attention provider for GPUs.

Must not know layers or models: what it needs of a step is the protocol below.
"""

from __future__ import annotations

from typing import Protocol

import torch

from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.tiles import DeviceLimits


class AttentionMetadata(Protocol):
    """What a step says about its N tokens and B sequences; its tensors are on the device."""

    @property
    def block_table(self) -> torch.Tensor:
        """[rows, max_blocks] int32."""

    @property
    def seq_rows(self) -> torch.Tensor:
        """[>= B] int32: the row of the block table that each sequence has."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[B + 1] int32: where each sequence's tokens start, then the number of real tokens."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[>= B] int32: keys of each sequence, this step's tokens included."""

    @property
    def seq_order(self) -> torch.Tensor:
        """[>= B] int32: the order in which decodes start."""

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
        """device is the one whose tensors attend will get."""
        self._limits = DeviceLimits.of(device)
        self._pdl = has_dependent_launch(device)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend with q [N, Hq, D], which may be a slice of a projection.

        kv_cache is [num_blocks, 2, block_size, Hkv, D] of its dtype and holds this step's keys and
        values already. Returns [N, Hq, D], contiguous, 0 in the rows of padding. scale and window
        are paged_attention's.
        """
        return paged_attention(
            q,
            kv_cache,
            metadata.block_table,
            metadata.seq_rows,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.seq_order,
            num_seqs=metadata.num_seqs,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            scale=scale,
            window=window,
            limits=self._limits,
            pdl=self._pdl,
        )
