"""The attention backend for GPUs: our Triton kernels behind one object. Must not know layers or
models."""

import torch

from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.paged_decode import rotate_and_attend
from worker_daemon.kernels.tiles import DeviceLimits, run_at_once


class TritonAttention:
    """AttentionBackend on one CUDA device, one object for all layers. Owns no device memory; step
    thread only."""

    def __init__(self, device: torch.device) -> None:
        """device is the one whose tensors attend will get."""
        self._limits = DeviceLimits.of(device)
        self._pdl = has_dependent_launch(device)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """As AttentionBackend has it; the result is contiguous, 0 in the rows of padding."""
        return paged_attention(
            q,
            kv_cache,
            metadata,
            scale=layer.scale,
            window=layer.window,
            limits=self._limits,
            pdl=self._pdl,
        )

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
    ) -> torch.Tensor:
        """As AttentionBackend has it; by one kernel in a step of decodes alone that is not too
        large, which then stores nothing of padding."""
        metadata = step.metadata
        num_programs = metadata.num_seqs * kv_cache.shape[3]
        if metadata.max_query_len != 1 or not run_at_once(num_programs, self._limits):
            q = layer.rotate_and_store(qkv, kv_cache, step)
            return self.attend(q, kv_cache, layer, metadata)
        return rotate_and_attend(
            qkv,
            kv_cache,
            step,
            layer.norms,
            scale=layer.scale,
            window=layer.window,
            limits=self._limits,
            pdl=self._pdl,
        )
