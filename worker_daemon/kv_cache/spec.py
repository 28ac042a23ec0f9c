"""What this rank's layers keep in the KV cache, in the wire's words."""

from collections.abc import Sequence

import torch

from rpc_schema.kv_cache import KVCacheSpec
from worker_daemon.layers.attention import KVLayerSpec


def describe_layers(layers: Sequence[KVLayerSpec], dtype: torch.dtype) -> tuple[KVCacheSpec, ...]:
    """Return one KVCacheSpec a local layer: K and V of every local KV head."""
    return tuple(
        KVCacheSpec(
            layer_name=layer.name,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_dim,
            dtype=str(dtype).removeprefix("torch."),
            bytes_per_token=2 * layer.num_kv_heads * layer.head_dim * dtype.itemsize,
            sliding_window=layer.window,
        )
        for layer in layers
    )
