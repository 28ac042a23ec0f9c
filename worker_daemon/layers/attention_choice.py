"""Chooses a model's attention: the device's paged kernels, its unpaged ones for long prompts, and
cuDNN for whole prompts if it passes a trial."""

import logging
import warnings
from dataclasses import dataclass

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
from worker_daemon.layers.torch_attention import TorchPagedAttention
from worker_daemon.layers.torch_ops import TorchOps

MAX_HEAD_DIM = 256

_MAX_RELATIVE_ERROR = 2e-2
"""Bound on the relative error: bf16 causes a quarter of it, a wrong mask or scale much more."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChosenAttention:
    """An implementation and the name under which a daemon reports it."""

    name: str
    backend: AttentionBackend
    gathered: GatheredAttention | None = None
    """For long prompts; None if the backend computes them."""


def choose_attention(
    paged: ChosenAttention, device: torch.device, heads: HeadSizes, dtype: torch.dtype
) -> ChosenAttention:
    """Return the device's attention: paged, and unpaged for long prompts, with cuDNN for whole ones
    if it is correct for this rank's heads. Waits for the device. Call this on the step thread.

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
    if dtype not in (torch.bfloat16, torch.float16):
        return paged
    if not is_accurate(cudnn_attention, paged.gathered, device, heads, dtype):
        return ChosenAttention(paged.name, PromptAttention(paged.backend, paged.gathered))
    backend = PromptAttention(paged.backend, paged.gathered, cudnn_attention)
    return ChosenAttention(f"{paged.name}+cudnn", backend)


@torch.inference_mode()
def is_accurate(
    whole: WholeAttention,
    gathered: GatheredAttention,
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
    if relative_error < _MAX_RELATIVE_ERROR:
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
