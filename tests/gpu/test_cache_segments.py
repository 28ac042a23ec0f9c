"""The KV cache's memory goes back to the device, whatever was allocated beside it."""

import random

import pytest
import torch

from worker_daemon.worker.sleep_memory import TORCH_SEGMENT_BYTES, TaggedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_buffers_that_outlive_the_cache_do_not_keep_its_memory() -> None:
    """Those of more than a megabyte fit into the rest of a segment."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    num_bytes = (1 << 30) + random.randrange(TORCH_SEGMENT_BYTES // 2)
    cache = TaggedMemory(device).make_kv_cache(num_bytes, torch.uint8)
    assert cache.shape == (num_bytes,) and not cache.any()
    buffers = [torch.empty(1_310_720, dtype=torch.uint8, device=device) for _ in range(4)]
    del cache
    torch.cuda.empty_cache()
    kept = torch.cuda.memory_reserved(device) - before
    assert kept < 1 << 28, f"{kept} bytes stayed with the allocator beside {len(buffers)} buffers"
