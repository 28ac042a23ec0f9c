"""The cache write under Triton's interpreter against plain indexing; run by test_interpreted."""

import pytest
import torch

from worker_daemon.kernels.kv_write import write_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [(1, 8, 8), (3, 80, 16), (8, 128, 16), (32, 96, 32)],
)
def test_slots_are_written_and_nothing_else(
    dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    num_blocks, num_tokens = 9, 40
    shape = (num_blocks, 2, block_size, num_kv_heads, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    width = num_kv_heads * head_dim
    projected = torch.randn(num_tokens, 5 + 2 * width, generator=generator).to(dtype)
    k, v = projected[:, 5:].unflatten(1, (2, num_kv_heads, head_dim)).unbind(1)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    slots[::7] = -1

    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = k[token]
            expected[slot // block_size, 1, slot % block_size] = v[token]
    write_kv(k, v, cache, slots)
    assert torch.equal(cache, expected)


def test_no_tokens() -> None:
    cache = torch.ones(2, 2, 8, 1, 16)
    write_kv(torch.ones(0, 1, 16), torch.ones(0, 1, 16), cache, torch.ones(0, dtype=torch.int64))
    assert torch.equal(cache, torch.ones_like(cache))
