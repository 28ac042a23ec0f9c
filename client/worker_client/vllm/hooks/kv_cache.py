"""The daemons' plan of the KV cache in vLLM's terms: one layer for each KV group. The plan is
made, and the memory allocated, before vLLM asks."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

from rpc_schema.kv_cache import BlockGroup
from worker_client.group.loading import LoadedGroup

_DTYPE = torch.bfloat16
_BLOCK_VALUES = 64
"""Values of a page for each token of the smallest block. vLLM only divides by the page's bytes."""


def specs_of(model: LoadedGroup) -> dict[str, KVCacheSpec]:
    """Return one layer for each KV group, in order. All have pages of the same size, whatever the
    daemons' are, so that vLLM plans as many blocks as there are."""
    largest = max(group.block_size for group in model.groups)
    return {
        f"group.{number}": _spec(group, largest // group.block_size * _BLOCK_VALUES)
        for number, group in enumerate(model.groups)
    }


def _spec(group: BlockGroup, head_size: int) -> KVCacheSpec:
    fields: dict[str, Any] = {
        "block_size": group.block_size,
        "num_kv_heads": 1,
        "head_size": head_size,
        "dtype": _DTYPE,
    }
    if group.window is None:
        return FullAttentionSpec(**fields)
    return SlidingWindowSpec(**fields, sliding_window=group.window)


def available_bytes(model: LoadedGroup) -> int:
    """Return the memory size from which vLLM computes exactly the daemons' number of blocks."""
    page = next(iter(specs_of(model).values())).page_size_bytes
    return int(model.num_blocks * page)


class GroupsAsGiven(DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """Makes one group of each layer of specs_of."""

    def get_kv_cache_groups(
        self, vllm_config: Any, kv_cache_spec: Mapping[str, KVCacheSpec]
    ) -> list[KVCacheGroupSpec]:
        """Return the groups, in the daemons' order."""
        return [KVCacheGroupSpec([name], spec) for name, spec in kv_cache_spec.items()]
