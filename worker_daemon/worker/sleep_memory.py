"""The memory of a rank's weights, model buffers and KV cache, and its sleep and wake-up. Owns that
memory and the state of its tags.

`ArenaMemory` can sleep: each tag's tensors lie in arenas, whose addresses do not change. Its base,
`TaggedMemory`, is memory of torch's allocator and cannot sleep. Used on the step thread, with no
request's rows alive.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.errors import ConfigError
from rpc_schema.lifecycle import MemoryTag, SleepLevel, TagState
from worker_daemon.device.arena import Arena, arena_bytes, open_arena
from worker_daemon.device.backup import HostBackup
from worker_daemon.device.pinned import DeviceCopier, open_uploads
from worker_daemon.errors import config_error
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.worker.memory_tags import ALL_AWAKE, MemoryTags

WEIGHT_CHUNK_BYTES: Final = 128 << 20
"""Small enough that memory is freed while the rest is copied, large enough that mapping costs
little."""
TORCH_SEGMENT_BYTES: Final = 2 << 20
"""torch's allocator takes large memory from the device in multiples of it (PyTorch, "CUDA
semantics", memory management)."""
KV_CHUNK_BYTES: Final = 4 << 30
"""Chunk size of memory that is never copied, only mapped and zeroed."""

_AWAY: Final[frozenset[TagState]] = frozenset(("asleep", "discarded"))
"""States without mapped memory."""

_LOG = logging.getLogger(__name__)


class HeldStage(NamedTuple):
    """A stage, and its rotary tables on the device."""

    stage: DecoderStage
    rotary: Sequence[Tensor]


class TaggedMemory:
    """A loaded model's memory, from torch's allocator. Refuses to sleep; see ArenaMemory for memory
    that can."""

    tags = ALL_AWAKE
    """The state of each tag."""
    states: Mapping[MemoryTag, TagState] = MappingProxyType({})
    """The states by tag; empty if the memory cannot sleep."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hold_stages(self, target: HeldStage, draft: HeldStage | None = None) -> None:
        """Give zeroed memory to the parameters and expert loads of stages that were built on the
        meta device, and memory to their KV scales, which become 1. Store their rotary tables.
        draft: the draft model, which no update of the target's weights brings. Raises
        torch.OutOfMemoryError or CapacityError."""
        for stage, rotary in filter(None, (target, draft)):
            scales = [each.parameter for each in stage.kv_scales]
            for parameter in [*stage.parameters(), *scales]:
                meta = parameter.data
                parameter.data = torch.zeros(meta.shape, dtype=meta.dtype, device=self._device)
            for each in stage.kv_scales:
                each.reset()
            stage.rotary = tuple(rotary)
            stage.allocate_routing(self._device)

    def make_adapters(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return zeroed adapter slots. They lose their content whenever the weights sleep: the host
        has a copy. Raises as hold_stages does."""
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def make_kv_cache(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed [numel], in place of the previous one. Raises as hold_stages does."""
        if self._device.type == "cpu":  # Linux zeroes the pages on first touch
            return torch.from_numpy(np.zeros(numel * dtype.itemsize, np.uint8)).view(dtype)
        # Whole segments of torch's allocator: it would give the rest of the last one to another
        # tensor, and the whole cache could not be returned to the device before that one is freed.
        num_bytes = numel * dtype.itemsize
        num_segments = -(-num_bytes // TORCH_SEGMENT_BYTES)
        size = num_segments * TORCH_SEGMENT_BYTES
        whole = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return whole[:num_bytes].view(dtype)

    def drop_kv_cache(self) -> None:
        """Free the KV cache; its tensors must not be used any more. Idempotent."""

    def prepare(self) -> None:
        """Prepare for the first sleep, now that the model serves."""

    def sleep(self, level: SleepLevel) -> None:
        """Unmap both tags; the content of the weights goes to the host at level 1.

        Raises:
            CapacityError: the host has no room for it; nothing has changed.
            ConfigError: sleeping is not enabled.
        """
        raise _not_enabled()

    def wake_up(self, tags: Collection[MemoryTag] | None) -> None:
        """Map memory for the tags again; None for all.

        Raises:
            CapacityError: the device has too little memory left; every tag stays as it is.
            ConfigError: sleeping is not enabled.
        """
        raise _not_enabled()

    def discard(self, tags: Collection[MemoryTag]) -> None:
        """Unmap the tags; their content is lost. Raises ConfigError."""
        raise _not_enabled()

    def weights_filled(self) -> None:
        """Record that all weights were written: lost weights are awake again."""

    def bytes_by_kind(self) -> Mapping[str, int]:
        """Return the bytes held now, by kind, for memory that can change."""
        return {}

    def stop(self) -> None:
        """Stop background work: the process is about to end."""

    def close(self) -> None:
        """Free everything; none of its tensors may be used any more. Idempotent."""


class _Kept:
    """An arena, and the host memory for its content."""

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        chunk_bytes: int,
        host_room: Callable[[], int] | None,
    ) -> None:
        self.arena = open_arena(num_bytes, chunk_bytes, device)
        sizes = [span.num_bytes for span in self.arena.spans]
        self.backup = HostBackup(sizes, device, host_room)

    def save(self, copies: DeviceCopier) -> list[Callable[[], None]]:
        """Start to copy all chunks to the host; return the waits for each, in order."""
        waits = []
        for span, buffer in zip(self.arena.spans, self.backup.buffers(), strict=True):
            copies.copy(self.arena.bytes_of(span), buffer.bytes)
            waits.append(copies.mark())
        return waits

    def restore(self, copies: DeviceCopier) -> None:
        """Map all of it, then start to copy its content back."""
        buffers = self.backup.buffers()
        self.arena.map_all()
        for span, buffer in zip(self.arena.spans, buffers, strict=True):
            copies.copy(buffer.bytes, self.arena.bytes_of(span))

    def close(self) -> None:
        self.arena.close()
        self.backup.close()


class ArenaMemory(TaggedMemory):
    """Arenas for weights, model buffers, adapters and KV cache, and page-locked host memory for the
    first two. Buffers are rotary tables, the scales of quantized matrices and KV caches, and the
    draft model. They belong to the tag `weights`; their content is restored at any sleep level,
    since not every weight update brings them."""

    def __init__(
        self,
        device: torch.device,
        *,
        weight_chunk_bytes: int = WEIGHT_CHUNK_BYTES,
        kv_chunk_bytes: int = KV_CHUNK_BYTES,
        host_room: Callable[[], int] | None = None,
    ) -> None:
        """Allocates nothing yet; host_room: see HostBackup."""
        super().__init__(device)
        self._weight_chunk_bytes = weight_chunk_bytes
        self._kv_chunk_bytes = kv_chunk_bytes
        self._host_room = host_room
        self._weights: _Kept | None = None
        self._buffers: _Kept | None = None
        self._kv_cache: Arena | None = None
        self._adapters: Arena | None = None

    @property
    def states(self) -> Mapping[MemoryTag, TagState]:  # type: ignore[override]  # it changes here
        return self.tags.states

    def hold_stages(self, target: HeldStage, draft: HeldStage | None = None) -> None:
        stage = target.stage
        parameters = [p for p in stage.parameters() if not p.is_kept]
        self._weights = self._keep(parameter.num_bytes for parameter in parameters)
        for parameter in parameters:
            meta = parameter.data
            parameter.data = self._weights.arena.take(tuple(meta.shape), meta.dtype)
        kept = [p for p in stage.parameters() if p.is_kept]
        kept += [each.parameter for each in stage.kv_scales]
        kept += [] if draft is None else draft.stage.parameters()
        held = [each for each in (target, draft) if each is not None]
        tables = [table for each in held for table in each.rotary]
        table_bytes = [table.numel() * table.element_size() for table in tables]
        self._buffers = self._keep([*table_bytes, *(each.num_bytes for each in kept)])
        take = self._buffers.arena.take
        for each in held:
            each.stage.rotary = tuple(take(tuple(x.shape), x.dtype).copy_(x) for x in each.rotary)
        for parameter in kept:
            meta = parameter.data
            parameter.data = take(tuple(meta.shape), meta.dtype)
        for scale in stage.kv_scales:
            scale.reset()
        for each in held:
            each.stage.allocate_routing(self._device)  # torch's: it is read during a sleep

    def make_adapters(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        self._adapters = open_arena(num_bytes, self._kv_chunk_bytes, self._device)
        return self._adapters.take(shape, dtype)

    def make_kv_cache(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.drop_kv_cache()
        self._kv_cache = open_arena(numel * dtype.itemsize, self._kv_chunk_bytes, self._device)
        return self._kv_cache.take((numel,), dtype)

    def drop_kv_cache(self) -> None:
        if self._kv_cache is not None:
            self._synchronize()
            self._kv_cache.close()
            self._kv_cache = None
        self.tags = self.tags.after_dropping_kv_cache()

    def prepare(self) -> None:
        for kept in self._held:
            kept.backup.prepare_ahead()

    def sleep(self, level: SleepLevel) -> None:
        self._leave(self.tags.after_sleep(level))

    def discard(self, tags: Collection[MemoryTag]) -> None:
        self._leave(self.tags.after_discard(tags))

    def wake_up(self, tags: Collection[MemoryTag] | None) -> None:
        after = self.tags.after_wake_up(tags)
        began = time.monotonic()
        self._release_cached()
        copies = open_uploads(self._device)
        returning = self._returning(after)
        try:
            for arena, kept in returning:
                if kept is None:
                    arena.map_all()
                    arena.zero()
                else:
                    kept.restore(copies)
        except BaseException:
            self._synchronize()
            for arena, _ in returning:
                arena.unmap_all()
            raise
        self._synchronize()
        self._change(after, began)

    def weights_filled(self) -> None:
        assert self.tags.weights in ("awake", "lost"), "unmapped memory cannot be written"
        self.tags = self.tags.after_filling()

    def bytes_by_kind(self) -> Mapping[str, int]:
        held = {
            "weights": 0 if self._weights is None else self._weights.arena.mapped_bytes,
            "buffers": 0 if self._buffers is None else self._buffers.arena.mapped_bytes,
            "kv_cache": 0 if self._kv_cache is None else self._kv_cache.mapped_bytes,
            **({} if self._adapters is None else {"adapters": self._adapters.mapped_bytes}),
            "host_backup": sum(kept.backup.held_bytes for kept in self._held),
        }
        if self._device.type == "cuda":
            held["torch_reserved"] = torch.cuda.memory_reserved(self._device)
        return held

    def stop(self) -> None:
        for kept in self._held:
            kept.backup.stop()

    def close(self) -> None:
        self.drop_kv_cache()
        self._synchronize()
        for kept in self._held:
            kept.close()
        if self._adapters is not None:
            self._adapters.close()
            self._adapters = None
        self._weights = self._buffers = None
        self.tags = ALL_AWAKE

    @property
    def _held(self) -> list[_Kept]:
        return [kept for kept in (self._weights, self._buffers) if kept is not None]

    def _keep(self, sizes: Iterable[int]) -> _Kept:
        num_bytes = max(
            1, arena_bytes(sizes)
        )  # an encoder has no buffers, but pages cannot be empty
        return _Kept(num_bytes, self._device, self._weight_chunk_bytes, self._host_room)

    def _leave(self, after: MemoryTags) -> None:
        """Unmap the memory that is not mapped in `after`. The KV cache is unmapped while copies
        run, other chunks once each is copied."""
        began = time.monotonic()
        saved, dropped = self._leaving(after)
        for kept in saved:
            kept.backup.buffers()  # may raise; nothing has changed yet
        self._synchronize()
        copies = open_uploads(self._device)
        saving = [(kept.arena, kept.save(copies)) for kept in saved]
        for arena in dropped:
            arena.unmap_all()
        for arena, waits in saving:
            for wait_until_copied in waits:
                wait_until_copied()
                arena.unmap_first()
        self._release_cached()
        self._change(after, began)

    def _leaving(self, after: MemoryTags) -> tuple[list[_Kept], list[Arena]]:
        """Return the mapped memory to unmap: arenas that the host keeps, and those that are
        dropped."""
        saved: list[_Kept] = []
        dropped: list[Arena] = []
        weights, buffers, kv_cache = self._weights, self._buffers, self._kv_cache
        if weights and buffers and weights.arena.is_mapped and after.weights in _AWAY:
            if after.weights == "asleep":
                saved.append(weights)
            else:
                dropped.append(weights.arena)
            saved.append(buffers)
            if self._adapters is not None:
                dropped.append(self._adapters)
        if kv_cache is not None and kv_cache.is_mapped and after.kv_cache in _AWAY:
            dropped.append(kv_cache)
        return saved, dropped

    def _returning(self, after: MemoryTags) -> list[tuple[Arena, _Kept | None]]:
        """Return the memory to map, each with its content on the host, if any. The KV cache comes
        last: it is mapped while weights are copied."""
        returning: list[tuple[Arena, _Kept | None]] = []
        weights, buffers, kv_cache = self._weights, self._buffers, self._kv_cache
        if weights and buffers and not weights.arena.is_mapped and after.weights not in _AWAY:
            returning.append((weights.arena, weights if after.weights == "awake" else None))
            returning.append((buffers.arena, buffers))
            if self._adapters is not None:
                returning.append((self._adapters, None))
        if kv_cache is not None and not kv_cache.is_mapped and after.kv_cache not in _AWAY:
            returning.append((kv_cache, None))
        return returning

    def _change(self, after: MemoryTags, began: float) -> None:
        self.tags = after
        _LOG.info("memory is %s after %.3f s", str(after) or "awake", time.monotonic() - began)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _release_cached(self) -> None:
        """Free torch's cache: the memory is needed elsewhere."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def open_memory(device: torch.device, *, can_sleep: bool) -> TaggedMemory:
    """Return the memory for a model that is about to be built."""
    return ArenaMemory(device) if can_sleep else TaggedMemory(device)


def _not_enabled() -> ConfigError:
    fix = "load the model with enable_sleep_mode"
    return config_error("enable_sleep_mode", False, "this model's memory cannot sleep", fix)
