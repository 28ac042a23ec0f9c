"""Chooses a model's attention: the device's paged kernels, its unpaged ones or a library's for long
prompts, and cuDNN for whole prompts if it passes a trial."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rpc_schema.errors import ConfigError
from worker_daemon.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    GatheredAttention,
)
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.prompt_attention import (
    PLAN_TOKENS,
    PromptAttention,
    WholeAttention,
    cudnn_attention,
)
from worker_daemon.layers.prompt_providers import (
    FlashAttention,
    PromptCase,
    PromptProvider,
    ScoreKind,
)
from worker_daemon.layers.provider_choice import (
    MAX_RELATIVE_ERROR,
    ProviderChoice,
    RandomChunk,
    Stopwatch,
    choose_provider,
    device_seconds,
)
from worker_daemon.layers.provider_records import ProviderRecords
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps

MAX_HEAD_DIM = 256

PROVIDERS: tuple[PromptProvider, ...] = (FlashAttention(),)
"""The libraries that are tried, if they are installed."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """An implementation and the name under which a daemon reports it."""

    name: str
    backend: AttentionBackend
    gathered: GatheredAttention[torch.Tensor] | None = None
    """For long prompts; None if the backend computes them."""
    gathered_fp8: GatheredAttention[Any] | None = None
    """For long prompts over a cache in FP8, with products in FP8; None if there is none."""
    long_chunks: str = ""
    """For the status: what was measured of libraries; empty if none is installed."""


def choose_attention(
    paged: ChosenAttention,
    device: torch.device,
    heads: HeadSizes,
    dtype: torch.dtype,
    kinds: Sequence[ScoreKind] = (),
    records: ProviderRecords | None = None,
    providers: Sequence[PromptProvider] = PROVIDERS,
    stopwatch: Stopwatch = device_seconds,
    *,
    in_fp8: bool = False,
) -> ChosenAttention:
    """Return the device's attention: paged, and unpaged for long prompts, by a library if one is
    faster, with cuDNN for whole ones if it is correct for this rank's heads and faster than the
    library. Waits for the device. Call this on the step thread.

    kinds: those of the model's layers; libraries are used for no others. records: of earlier
    choices; None keeps none. in_fp8: long prompts are ours, with products in FP8.

    Raises:
        ConfigError: no implementation supports heads of this size.
    """
    if device.type != "cuda" or paged.gathered is None:
        return paged
    if heads.head_dim % 8 or heads.head_dim > MAX_HEAD_DIM:
        raise ConfigError(
            "no attention kernel supports heads of this size",
            field="head_dim",
            value=heads.head_dim,
            fix=f"a multiple of 8, at most {MAX_HEAD_DIM}",
        )
    if in_fp8 and paged.gathered_fp8 is not None:
        return ChosenAttention(
            f"{paged.name}+fp8", PromptAttention(paged.backend, paged.gathered_fp8)
        )
    if dtype not in (torch.bfloat16, torch.float16):
        return paged
    case = PromptCase(device, dtype, heads, _with_short_sequences(kinds))
    records = ProviderRecords(None) if records is None else records
    choice = choose_provider(paged.gathered, providers, case, records, stopwatch)
    has_cudnn = is_accurate(cudnn_attention, paged.gathered, device, heads, dtype)
    if has_cudnn and _ALL_KEYS in choice.provided:
        has_cudnn = not _is_faster(choice, cudnn_attention, case, stopwatch)
    names = (paged.name, choice.name, "cudnn" if has_cudnn else "")
    whole = cudnn_attention if has_cudnn else None
    backend = PromptAttention(paged.backend, choice.gathered, whole)
    return ChosenAttention("+".join(filter(None, names)), backend, long_chunks=choice.report)


_ALL_KEYS = ScoreKind(None, None, False)
"""The only kind that cuDNN computes."""


def _with_short_sequences(kinds: Sequence[ScoreKind]) -> tuple[ScoreKind, ...]:
    """Return the distinct kinds, and those that layers with a window have for sequences that it
    covers."""
    return tuple(
        dict.fromkeys(each for kind in kinds for each in (kind, kind._replace(window=None)))
    )


@torch.inference_mode()
def _is_faster(
    choice: ProviderChoice, whole: WholeAttention, case: PromptCase, stopwatch: Stopwatch
) -> bool:
    """Return True if a library computes a whole prompt, of the length of a plan, faster."""
    chunk = RandomChunk(case, _ALL_KEYS, PLAN_TOKENS[-2], PLAN_TOKENS[-2])
    q, context, layer, _ = chunk.arguments
    queries, keys, values = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, *context))
    theirs = stopwatch(lambda: choice.gathered.attend(*chunk.arguments))
    return theirs < stopwatch(lambda: whole(queries, keys, values, layer.scale))


@torch.inference_mode()
def is_accurate(
    whole: WholeAttention,
    gathered: GatheredAttention[torch.Tensor],
    device: torch.device,
    heads: HeadSizes,
    dtype: torch.dtype,
) -> bool:
    """Return True if `whole` computes a random prompt as plain torch does in float32, in a step
    laid out like a model's. An implementation that raises is logged and counts as inaccurate."""
    num_tokens = PLAN_TOKENS[1] - 40  # a prompt that is padded (prompt_attention.py)
    random = torch.Generator(device).manual_seed(0)
    num_q_heads, num_kv_heads = heads.num_attention_heads, heads.num_key_value_heads
    shape = (num_tokens, num_q_heads + 2 * num_kv_heads, heads.head_dim)
    qkv = torch.randn(shape, generator=random, device=device, dtype=dtype)
    q, k, v = torch.split(qkv, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    kv_cache, metadata = _one_prompt(k, v)
    plain = TorchPagedAttention()
    scale = heads.head_dim**-0.5
    layer = AttentionLayer(TorchOps(), num_kv_heads, heads.head_dim, scale, window=None, norms=None)
    expected = plain.attend(q.float(), kv_cache.float(), layer, metadata)
    try:
        with warnings.catch_warnings():  # torch warns why it has no kernel
            warnings.simplefilter("ignore")
            out = PromptAttention(plain, gathered, whole).attend(q, kv_cache, layer, metadata)
        error = torch.linalg.vector_norm(out - expected) / torch.linalg.vector_norm(expected)
        relative_error = float(error)
    except RuntimeError as failure:
        _LOG.warning("whole prompts use our own kernels: %s", failure)
        return False
    if relative_error < MAX_RELATIVE_ERROR:
        return True
    _LOG.warning("whole prompts use our own kernels: relative error %.2g", relative_error)
    return False


def _one_prompt(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, AttentionMetadata]:
    """k and v [N, Hkv, D] -> a cache with them, and the step of a prompt that uses it."""
    block_size = 16
    num_tokens, num_kv_heads, head_dim = k.shape
    num_blocks = -(-num_tokens // block_size)
    kv_cache = k.new_zeros((1 + num_blocks, 2, block_size, num_kv_heads, head_dim))
    slots = torch.arange(num_tokens, device=k.device) + block_size
    for which, rows in enumerate((k, v)):
        kv_cache[slots // block_size, which, slots % block_size] = rows
    blocks = torch.arange(1, 1 + num_blocks, dtype=torch.int32, device=k.device)
    zero, length = blocks.new_zeros(1), blocks.new_full((1,), num_tokens)
    metadata = AttentionMetadata(
        query_start_loc=torch.cat((zero, length)),
        seq_lens=length,
        seq_order=zero,
        block_table=blocks.unsqueeze(0),
        seq_rows=zero,
        slot_mapping=slots,
        num_seqs=1,
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        query_lens_np=np.array([num_tokens], np.int32),
        seq_lens_np=np.array([num_tokens], np.int32),
    )
    return kv_cache, metadata
