"""Attention of a mixed batch of prefill and decode queries over a paged KV cache.

Grids depend on host-side sizes, so a launch never waits for the device.

Letters: N tokens, B sequences, Hq / Hkv query and KV heads, G = Hq / Hkv, D head dimension.
"""

import torch

from worker_daemon.contracts.attention import (
    AttentionLayer,
    AttentionMetadata,
    AttentionSinks,
    AttentionStep,
)
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.kernels.attention_merge import merge_parts
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_decode import (
    MAX_DECODE_QUERIES,
    MAX_DECODE_ROWS,
    launch_decode,
    plan_beside_prompts,
    plan_decode,
    rotate_and_attend,
)
from worker_daemon.kernels.paged_prefill import launch_prefill, plan_blocks
from worker_daemon.kernels.scores import Scoring
from worker_daemon.kernels.tiles import (
    MIN_BLOCK_PIECE_KEYS,
    MIN_PIECE_KEYS,
    DeviceLimits,
    Tile,
    run_at_once,
    split_tile,
)


class TritonAttention:
    """AttentionBackend on one CUDA device, one object for all layers. Owns no device memory; step
    thread only."""

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._limits = DeviceLimits.of(device)
        self._pdl = has_dependent_launch(device)

    def attend(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. The result is contiguous, 0 in the rows of padding.

        A few decodes come here if a prompt has the rest of their step. They are always cut, by
        one kernel, which warm-up compiles: those for their number and context would be compiled in
        such a step."""
        tile, num_kv_heads = None, kv_cache.shape[3]
        num_programs = metadata.num_seqs * num_kv_heads
        is_cut = metadata.max_query_len == 1 and run_at_once(num_programs, self._limits)
        if is_cut:
            tile = split_tile(q.shape[1] // num_kv_heads, q.shape[2], q.dtype, self._limits)
        return paged_attention(
            q,
            kv_cache,
            metadata,
            scale=layer.scale,
            window=layer.window,
            logit_softcap=layer.logit_softcap,
            sinks=layer.sinks,
            kv_scales=layer.kv_scales,
            lse=lse,
            limits=self._limits,
            tile=tile,
            is_cut=is_cut,
            pdl=self._pdl,
        )

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. A step with only decodes that is not too large uses one kernel,
        which stores nothing for padding."""
        metadata = step.metadata
        num_programs = metadata.num_seqs * kv_cache.shape[3]
        if metadata.max_query_len != 1 or not run_at_once(num_programs, self._limits):
            q = layer.rotate_and_store(qkv, kv_cache, step)
            return self.attend(q, kv_cache, layer, metadata, lse)
        return rotate_and_attend(
            qkv,
            kv_cache,
            step,
            layer.norms,
            interleaved=layer.interleaved,
            scale=layer.scale,
            window=layer.window,
            logit_softcap=layer.logit_softcap,
            sinks=layer.sinks,
            kv_scales=layer.kv_scales,
            lse=lse,
            limits=self._limits,
            pdl=self._pdl,
        )

    def merge(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionBackend."""
        return merge_parts(outs, lses, pdl=self._pdl)


def is_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, batch: AttentionMetadata, tile: Tile | None
) -> bool:
    """Return True if the queries of a sequence, a few at most, share the tile of a decode, as those
    after its drafts do: each key is then read once for all of them. A few queries of one sequence
    beside many of one query would give these tiles of mostly empty rows. tile: the only one
    allowed."""
    most_queries = batch.max_query_len
    rows = most_queries * q.shape[1] // kv_cache.shape[3]
    most = MAX_DECODE_ROWS if tile is None else min(tile.block_m, MAX_DECODE_ROWS)
    if not 1 < most_queries <= MAX_DECODE_QUERIES:
        return most_queries == 1
    return rows <= most and most_queries * batch.num_seqs <= 2 * q.shape[0]


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: AttentionMetadata,
    *,
    scale: float,
    window: int | None,
    logit_softcap: float | None = None,
    sinks: AttentionSinks | None = None,
    kv_scales: KVScales | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    limits: DeviceLimits | None = None,
    tile: Tile | None = None,
    num_splits: int | None = None,
    min_piece: int = MIN_PIECE_KEYS,
    min_block_piece: int = MIN_BLOCK_PIECE_KEYS,
    is_cut: bool = False,
    workspace: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute causal softmax(scale * q k^T) v of every query token over its sequence's cached keys,
    with a softcap or sinks if given.

    Query token i of a sequence stands at p = seq_len - query_len + i and sees the keys max(0, p -
    window + 1) .. p, which must already be in the cache. Sums are kept in fp32; fp32 inputs are
    multiplied exactly (no TF32). A batch whose max_query_len is 1, or small, uses the decode path,
    which may divide each sequence's keys into splits. So do a mixed batch's sequences of as few
    queries, if they may have many keys.

    Args:
        q: [N, Hq, D] fp32, bf16 or fp16, the last dimension contiguous. D is a multiple of 8 up to
            256, G any integer up to the rows of a tile.
        kv_cache: [num_blocks, 2, block_size, Hkv, D], dtype of q or, with kv_scales, FP8; [:, 0] is
            K and [:, 1] is V.
        batch: the sequences; their real tokens are the first of the N.
        scale: factor of the scores, > 0.
        window: keys a query sees, itself included; None = all.
        logit_softcap, sinks: see AttentionLayer.
        kv_scales: the scales of a cache in FP8, with D a multiple of 16.
        out: [N, Hq, D], dtype of q; allocated when None. Rows past the last real token become 0.
        lse: [N, Hq] fp32, contiguous; see AttentionBackend.
        limits: the device's; looked up when None.
        tile: overrides the choice of tile.
        num_splits: overrides the choice of splits, >= 1, of a batch with a small max_query_len.
        min_piece: keys of a piece, at least, where sequences of different lengths are cut.
        min_block_piece: the same for blocks of a prompt's query tokens.
        is_cut: let the device cut keys whatever the step's tokens and contexts.
        workspace: fp32, flat, at least `workspace_elements(...)` with num_splits; allocated when
            None and needed.
        pdl: launch as launch.has_dependent_launch allows on this device.

    Returns:
        out.
    """
    scales = None if kv_scales is None else kv_scales.values
    assert kv_cache.dtype == (q.dtype if scales is None else FP8)
    assert q.stride(2) == kv_cache.stride(4) == batch.block_table.stride(1) == 1
    assert q.shape[1] % kv_cache.shape[3] == 0
    assert lse is None or (lse.is_contiguous() and lse.dtype == torch.float32)
    scoring = Scoring(scale, window, logit_softcap, sinks)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if q.shape[0] == 0:
        return out
    limits = DeviceLimits.of(q.device) if limits is None else limits
    if is_decode(q, kv_cache, batch, tile):
        plan = plan_decode(
            q, kv_cache, batch, window, limits, tile, num_splits, min_piece, is_cut=is_cut
        )
        launch_decode(out, lse, q, kv_cache, scales, batch, None, scoring, plan, workspace, pdl)
        return out
    short = plan_beside_prompts(q, kv_cache, batch, window, limits, min_piece)
    fewest = 1
    if short is not None:
        fewest = short.queries + 1
        launch_decode(out, lse, q, kv_cache, scales, batch, None, scoring, short, workspace, pdl)
    blocks = plan_blocks(
        q, kv_cache, batch, window, limits, tile, fewest, min_block_piece, is_cut=is_cut
    )
    launch_prefill(out, lse, q, kv_cache, scales, batch, scoring, blocks, pdl)
    return out
