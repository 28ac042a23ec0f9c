"""The KV cache's memory: one allocation for all layers of this rank, split into tensors of pages.
Each tensor serves one layer of every group."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rpc_schema.errors import CapacityError
from rpc_schema.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVPages, LatentPages
from worker_daemon.device.failures import FailureKind, judge
from worker_daemon.errors import config_error
from worker_daemon.layers.cache_spec import CacheSpec, LatentLayerSpec


class LayerKV(NamedTuple):
    """The pages of a layer."""

    cache: Tensor
    """[num_blocks, *page shape]: CacheSpec.page_shape. A layer of another group may use other
    blocks of the same memory."""
    group: int
    """The layer's KV group; its block table lists the layer's blocks."""


def describe_layers(layers: Sequence[CacheSpec], dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
    """Return one KVCacheSpec per local layer."""
    return tuple(_describe(layer, dtype) for layer in layers)


def _describe(layer: CacheSpec, dtype: torch.dtype) -> KVCacheSpec:
    name, bytes_per_token = str(dtype).removeprefix("torch."), layer.token_values * dtype.itemsize
    if isinstance(layer, LatentLayerSpec):
        return LatentPages(
            layer_name=layer.name,
            width=layer.width,
            dtype=name,
            bytes_per_token=bytes_per_token,
            sliding_window=layer.window,
        )
    return KVPages(
        layer_name=layer.name,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_dim,
        dtype=name,
        bytes_per_token=bytes_per_token,
        sliding_window=layer.window,
    )


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[CacheSpec],
    dtype: torch.dtype,
    make_zeros: Callable[[int, torch.dtype], Tensor],
) -> list[LayerKV]:
    """Return zeroed caches, one per layer, in memory from make_zeros(number of elements, dtype).

    Zeroed: a kernel may read past the end of a sequence, and NaN times a zero weight is NaN.

    Raises:
        ConfigError: the plan does not match these layers.
        CapacityError: the device has too little memory.
    """
    _check_plan(config, layers, dtype)
    if not layers:
        return []
    num_tensors = max(len(group.layer_names) for group in config.groups)
    sizes = [config.size_bytes // dtype.itemsize // num_tensors] * num_tensors
    try:
        arena = make_zeros(sum(sizes), dtype)
    except (RuntimeError, MemoryError, CapacityError) as error:
        if not isinstance(error, CapacityError) and judge(error) is not FailureKind.OUT_OF_MEMORY:
            raise
        raise CapacityError(
            f"the KV cache does not fit: {error}",
            field="kv_cache_config.size_bytes",
            value=config.size_bytes,
            fix="plan fewer blocks",
        ) from None
    pieces = torch.split(arena, sizes)
    places = {
        name: (tensor, number)
        for number, group in enumerate(config.groups)
        for tensor, name in enumerate(group.layer_names)
    }
    caches = []
    for layer in layers:
        tensor, number = places[layer.name]
        shape = (config.num_blocks, *layer.page_shape(config.groups[number].block_size))
        caches.append(LayerKV(pieces[tensor].view(shape), number))
    return caches


def _check_plan(config: KVCacheConfig, layers: Sequence[CacheSpec], dtype: torch.dtype) -> None:
    planned = sorted(name for group in config.groups for name in group.layer_names)
    local = sorted(layer.name for layer in layers)
    if planned != local:
        problem = "the plan names other layers than this rank has"
        raise config_error("kv_cache_config.groups", planned, problem, f"exactly {local}")
    by_name = {layer.name: layer for layer in layers}
    page_bytes = 0
    for group in config.groups:
        for name in group.layer_names:
            page_bytes = page_bytes or _page_bytes(group, by_name[name], dtype)
            _check_layer(group, by_name[name], dtype, page_bytes)
    num_tensors = max(len(group.layer_names) for group in config.groups)
    expected = config.num_blocks * num_tensors * page_bytes
    if config.size_bytes != expected:
        problem = "the plan's size does not follow from its blocks"
        fix = f"{config.num_blocks} blocks of {config.block_size} tokens take {expected} bytes"
        raise config_error("kv_cache_config.size_bytes", config.size_bytes, problem, fix)


def _check_layer(
    group: KVCacheGroup, layer: CacheSpec, dtype: torch.dtype, page_bytes: int
) -> None:
    own, seen = str(dtype).removeprefix("torch."), group.sliding_window
    if group.dtype != own:
        problem = "the model was loaded for a KV cache of another dtype"
        raise config_error("kv_cache_config.groups.dtype", group.dtype, problem, own)
    if group.layout != layer.layout:
        problem = f"{layer.name} has pages of another layout"
        raise config_error("kv_cache_config.groups.layout", group.layout, problem, layer.layout)
    if seen is not None and (layer.window is None or layer.window > seen):
        problem = f"{layer.name} sees more than its group keeps"
        fix = "none" if layer.window is None else f"{layer.window} or more"
        raise config_error("kv_cache_config.groups.sliding_window", seen, problem, fix)
    if _page_bytes(group, layer, dtype) != page_bytes:
        problem = "pages of all groups have the same size"
        fix = f"as many tokens as take {page_bytes} bytes of {layer.name}"
        raise config_error("kv_cache_config.groups.block_size", group.block_size, problem, fix)


def _page_bytes(group: KVCacheGroup, layer: CacheSpec, dtype: torch.dtype) -> int:
    """Return the bytes that a layer keeps of a block's tokens."""
    return group.block_size * layer.token_values * dtype.itemsize
