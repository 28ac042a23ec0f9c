"""The attention provider for GPUs.

Must not know layers or models: what it needs of a step and of a layer are the protocols below.
"""

from __future__ import annotations

from typing import Protocol

import torch

from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.paged_decode import Projection, rotate_and_attend
from worker_daemon.kernels.paged_sequences import PagedSequences
from worker_daemon.kernels.tiles import DeviceLimits, run_at_once


class AttentionMetadata(PagedSequences, Protocol):
    """What a step says about its N tokens and B sequences."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[N] integer, on the device: block_id * block_size + offset; negative = not stored."""


class Rotation(Protocol):
    """What a layer says about its projection, as rope_store.rotate_and_store has it."""

    @property
    def positions(self) -> torch.Tensor:
        """[N] int32 or int64."""

    @property
    def rotary_table(self) -> torch.Tensor:
        """[P, 2, D / 2] fp32: cos, then sin."""

    @property
    def head_norms(self) -> tuple[torch.Tensor, float] | None:
        """[2, D] weights of the query and of the key norm; epsilon."""

    def rotate_and_store(
        self, qkv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        """The operation itself, by a kernel of its own: qkv [N, (Hq + 2 Hkv) D] -> q [N, Hq, D]."""


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
            metadata,
            scale=scale,
            window=window,
            limits=self._limits,
            pdl=self._pdl,
        )

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        rotation: Rotation,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """rotation.rotate_and_store and attend; by one kernel in a step of decodes alone that is
        not too large, which then stores nothing of padding."""
        num_programs = metadata.num_seqs * kv_cache.shape[3]
        if metadata.max_query_len != 1 or not run_at_once(num_programs, self._limits):
            q = rotation.rotate_and_store(qkv, kv_cache, metadata.slot_mapping)
            return self.attend(q, kv_cache, metadata, scale, window)
        projection = Projection(
            rotation.positions, rotation.rotary_table, rotation.head_norms, metadata.slot_mapping
        )
        return rotate_and_attend(
            qkv,
            projection,
            kv_cache,
            metadata,
            scale=scale,
            window=window,
            limits=self._limits,
            pdl=self._pdl,
        )
