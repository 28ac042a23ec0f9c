"""The KV cache's memory: one allocation for all layers of this rank, carved into a tensor a
layer."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rpc_schema.kv_cache import KVCacheConfig
from worker_daemon.device.failures import Verdict, judge
from worker_daemon.errors import CapacityError, ConfigError
from worker_daemon.layers.attention import KVLayerSpec


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[KVLayerSpec],
    dtype: torch.dtype,
    make_zeros: Callable[[int, torch.dtype], Tensor],
) -> list[Tensor]:
    """Return zeroed caches [num_blocks, 2, block_size, num_kv_heads, head_dim], one a layer, carved
    out of make_zeros(number of elements, dtype).

    Zeros, because a kernel may read behind a sequence's end, and NaN times a weight of zero is NaN.

    Raises:
        ConfigError: the plan is not one for these layers.
        CapacityError: the device has not that much memory.
    """
    _check_plan(config, layers, dtype)
    shapes = [
        (config.num_blocks, 2, config.block_size, layer.num_kv_heads, layer.head_dim)
        for layer in layers
    ]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    try:
        arena = make_zeros(sum(sizes), dtype)
    except (RuntimeError, MemoryError, CapacityError) as error:
        if not isinstance(error, CapacityError) and judge(error) is not Verdict.OUT_OF_MEMORY:
            raise
        raise CapacityError(
            f"the KV cache does not fit: {error}",
            field="kv_cache_config.size_bytes",
            value=config.size_bytes,
            fix="plan fewer blocks",
        ) from None
    pieces = torch.split(arena, sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _check_plan(config: KVCacheConfig, layers: Sequence[KVLayerSpec], dtype: torch.dtype) -> None:
    planned = sorted(name for group in config.groups for name in group.layer_names)
    local = sorted(layer.name for layer in layers)
    if planned != local:
        raise ConfigError(
            "the plan names other layers than this rank has",
            field="kv_cache_config.groups",
            value=planned,
            fix=f"exactly {local}",
        )
    per_token = sum(2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize for layer in layers)
    expected = config.num_blocks * config.block_size * per_token
    if config.size_bytes != expected:
        raise ConfigError(
            "the plan's size does not follow from its blocks",
            field="kv_cache_config.size_bytes",
            value=config.size_bytes,
            fix=f"{config.num_blocks} blocks of {config.block_size} tokens take {expected} bytes",
        )
