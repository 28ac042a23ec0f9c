"""Opens the host tier's memory, within what the daemon's operator and the host allow."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from rpc_schema.config import CacheConfig
from rpc_schema.errors import CapacityError
from rpc_schema.kv_cache import KVCacheConfig, KVPages, LatentPages, RowState
from worker_daemon.device.backup import RESERVE_BYTES, host_room_bytes
from worker_daemon.device.device_rows import DeviceRows
from worker_daemon.device.host_rows import HostRows, TierRows
from worker_daemon.device.kept_memory import KeptMapping, KeptMemory
from worker_daemon.errors import config_error
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.checksums import WORD_BYTES
from worker_daemon.runner.connectors.host_tier import tier_device_bytes
from worker_daemon.runner.connectors.staging import staging_device_bytes
from worker_daemon.runner.connectors.tier_index import SlotLayout, TierIndex
from worker_daemon.worker.loading import LoadedModel

_FIELD = "cache.kv_host_memory_bytes"
_PLACE = "cache.kv_tier_memory"


@dataclass(slots=True)
class TierMemory:
    """The memory of a plan's host tier. Owned by the worker."""

    rows: TierRows
    mapping: KeptMapping | None = None
    """Memory of the rows, if they outlive the daemon."""
    index: TierIndex | None = None
    """Contents of the rows then."""

    @property
    def is_there(self) -> bool:
        """True if rows may be written to. Any thread may ask."""
        return self.mapping is None or self.mapping.is_there

    def wait_until_there(self) -> None:
        """Wait until rows may be written to. Raises: see KeptMapping.wait_until_there."""
        if self.mapping is not None:
            self.mapping.wait_until_there()

    def close(self) -> None:
        """Free it, but for what outlives the daemon. No copy is in progress."""
        self.rows.close()
        if self.index is not None:
            self.index.close()
        if self.mapping is not None:
            self.mapping.close()


def check_host_memory(
    cache: CacheConfig, most_bytes: int | None, kept: KeptMemory | None = None
) -> None:
    """Check the size of the host tier against the daemon's bound, and against the room for it.
    kept: where it outlives the daemon.

    Raises:
        ConfigError: the operator allows less, or device memory is to outlive the daemon.
        CapacityError: there is too little room where it outlives the daemon.
    """
    size = cache.kv_host_memory_bytes
    if cache.kv_tier_memory == "device":
        if kept is not None:
            problem = "device memory does not outlive the daemon, which was started for that"
            fix = "host, or daemons without --kv-host-dir"
            raise config_error(_PLACE, cache.kv_tier_memory, problem, fix)
        return
    if most_bytes is not None and size > most_bytes:
        problem = "the daemon was started with --max-kv-host-memory-bytes of less"
        raise config_error(_FIELD, size, problem, f"at most {most_bytes}, or raise that")
    if kept is not None:
        kept.check_room(size)


def open_tier_memory(
    plan: KVCacheConfig,
    cache: CacheConfig,
    device: torch.device,
    checksum_bytes: int,
    kept: KeptMemory | None = None,
    identify: Callable[[SlotLayout], BlockIdentity] | None = None,
) -> TierMemory | None:
    """Return the memory of a plan's host tier, a row for each slot; None if it has none.
    checksum_bytes: of a block, in addition to what is configured. kept: where it outlives the
    daemon. identify: names its blocks then.

    Raises:
        ConfigError: the tier is larger than configured, a page is no whole number of words, or the
            file is not this user's alone.
        CapacityError: the host, the device, or the place where it outlives the daemon, has too
            little memory.
    """
    if not plan.num_host_blocks:
        return None
    block_bytes = block_bytes_of(plan, _FIELD, cache.kv_host_memory_bytes)
    size = plan.num_host_blocks * block_bytes
    if size > cache.kv_host_memory_bytes:
        problem = (
            f"that many blocks take {size} bytes, and {_FIELD} is {cache.kv_host_memory_bytes}"
        )
        fix = f"at most {cache.kv_host_memory_bytes // max(1, block_bytes)}"
        field = "kv_cache_config.num_host_blocks"
        raise config_error(field, plan.num_host_blocks, problem, fix)
    layout = SlotLayout(plan.num_host_blocks, block_bytes + checksum_bytes, checksum_bytes)
    if cache.kv_tier_memory == "device" and device.type != "cpu":
        return TierMemory(DeviceRows(layout.num_slots, layout.slot_bytes, device))
    size = layout.num_slots * layout.slot_bytes
    held = 0 if kept is None else kept.held_bytes
    room = host_room_bytes() - RESERVE_BYTES
    if size - held > room:
        raise CapacityError(
            f"the host tier takes {size} bytes, and the host has {max(0, room)} to give",
            field=_FIELD,
            value=cache.kv_host_memory_bytes,
            fix=f"at most {max(0, room)}, or free host memory",
        )
    if kept is None or identify is None:
        return TierMemory(HostRows(layout.num_slots, layout.slot_bytes, device))
    mapping = kept.open(layout.index_bytes, layout.total_bytes)
    rows = HostRows(layout.num_slots, layout.slot_bytes, device, mapping)
    return TierMemory(rows, mapping, TierIndex(mapping, layout, identify(layout)))


def block_bytes_of(plan: KVCacheConfig, field: str, value: object) -> int:
    """Return the bytes that a rank keeps of a block, for a KV connector. field, value: of the
    configuration that asks for it.

    Raises:
        ConfigError: a page is no whole number of words.
    """
    page_sizes = (plan.size_bytes // plan.num_blocks, plan.draft_bytes // plan.num_blocks)
    if not page_sizes[0] or any(size % WORD_BYTES for size in page_sizes):
        problem = f"pages of {page_sizes[0]} bytes on this rank are no whole number of words"
        fix = f"a block size whose pages are multiples of {WORD_BYTES} bytes, or none"
        raise config_error(field, value, problem, fix)
    return sum(page_sizes)


def connector_bytes(model: LoadedModel, device: torch.device) -> int:
    """Return the most device memory that a model's KV connectors take, besides what the memory
    profile finds; 0 without any, and on the CPU, whose memory is not profiled so closely."""
    cache = model.config.cache
    num_connectors = bool(cache.kv_host_memory_bytes) + cache.kv_files
    if not num_connectors or device.type == "cpu":
        return 0
    pages = _with_pages(model)
    block_bytes = max(1, cache.block_size * sum(layer.bytes_per_token for layer in pages))
    staging = num_connectors * staging_device_bytes(block_bytes)
    return staging + tier_device_bytes(cache, pages, block_bytes)


def _with_pages(model: LoadedModel) -> list[KVPages | LatentPages]:
    return [spec for spec in model.kv_cache_specs if not isinstance(spec, RowState)]
