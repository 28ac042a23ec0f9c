"""Writes the keys and values of a step's tokens into their slots of the paged cache.

Must not know requests or block tables: a slot number says it all.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

BLOCK_ELEMENTS = 1024
"""Elements of one token's K (and V) that one program copies."""


def write_kv(
    k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Store k and v at their slots.

    Args:
        k: [N, Hkv, D], any strides with the last dimension contiguous.
        v: [N, Hkv, D], likewise.
        kv_cache: [num_blocks, 2, block_size, Hkv, D], the dtype of k and v; written in place.
        slot_mapping: [N] int64, block_id * block_size + offset; negative = padding, not stored.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    assert v.shape == k.shape
    assert k.dtype == v.dtype == kv_cache.dtype
    assert k.stride(2) == v.stride(2) == kv_cache.stride(4) == 1
    assert slot_mapping.dtype == torch.int64
    if num_tokens == 0:
        return
    chunks = triton.cdiv(num_kv_heads * head_dim, BLOCK_ELEMENTS)
    _write_kv_kernel[(num_tokens, chunks)](
        k,
        v,
        kv_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=kv_cache.shape[2],
        BLOCK=BLOCK_ELEMENTS,
        num_warps=4,
        enable_fp_fusion=True,
    )


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def _write_kv_kernel(
    k,
    v,
    kv_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cache_block_stride,
    cache_value_stride,
    cache_token_stride,
    cache_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = element // HEAD_DIM
    dim = element % HEAD_DIM
    inside = element < NUM_KV_HEADS * HEAD_DIM
    key = tl.load(k + token * k_token_stride + head * k_head_stride + dim, mask=inside)
    value = tl.load(v + token * v_token_stride + head * v_head_stride + dim, mask=inside)
    target = kv_cache + (slot // BLOCK_SIZE) * cache_block_stride
    target += (slot % BLOCK_SIZE) * cache_token_stride + head * cache_head_stride + dim
    tl.store(target, key, mask=inside)
    tl.store(target + cache_value_stride, value, mask=inside)
