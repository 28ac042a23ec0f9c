"""A place outside of the KV cache for the contents of blocks, as the prefix cache sees it. A key is
a block's hash and a byte for its KV group."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from worker_client.scheduler.block_pool import OnEvict
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler.host_tier import TierSlots
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler_output import SchedulerOutput, StepValues
from worker_client.steps.cached_blocks import CachedBlocks


class OutsideBlocks(Protocol):
    """Contents that the next step can load, and those that it stores."""

    @property
    def room(self) -> int:
        """Number of blocks that the next step may still load."""

    def __contains__(self, key: bytes) -> bool:
        """Return True if the next step can load contents."""

    def keep(self, keys: Iterable[bytes]) -> None:
        """Evict none of these contents, which are there, before the next step."""

    def load(self, key: bytes, block_id: int) -> None:
        """Load contents that are kept into a block with the next step."""

    def offer(self, key: bytes, block_id: int) -> None:
        """Note that a block has contents that a request has sampled a token from, and keeps them
        until the next step at least."""

    def evict(self, key: bytes, block_id: int) -> None:
        """Note that a block loses its contents with the next step."""

    def take_moves(self, tag: bytes) -> tuple[StepValues, ...]:
        """Return what the step that is sent now moves. tag: of the hashes."""

    def fail(self, outputs: Iterable[SchedulerOutput]) -> None:
        """Forget what failed steps, and the one that was being planned, were to move."""

    def blocks_lost(self) -> None:
        """Store nothing that was offered: the KV cache has lost it."""

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget contents that cannot be trusted. Call it between steps."""

    def forget_all(self) -> None:
        """Forget all contents."""


class OutsidePlace:
    """The place that a scheduler's limits name: the ranks' host memory, files, or none. Owned by a
    scheduler, and belongs to its thread."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """Without a prefix cache nothing is moved: then there is none."""
        self.tier: TierSlots | None = None
        self.files: FetchedBlocks | None = None
        if limits.num_host_blocks and limits.shares_prefixes:
            self.tier = TierSlots(limits.num_host_blocks)
        elif limits.has_kv_files and limits.shares_prefixes:
            self.files = FetchedBlocks()
        self.blocks: OutsideBlocks | None = self.files if self.tier is None else self.tier
        """The one that there is."""

    @property
    def on_evict(self) -> OnEvict | None:
        """Callback of a pool, for the contents that its allocations take."""
        blocks = self.blocks
        if blocks is None:
            return None
        return lambda block_id, group, name: blocks.evict(key_of(group, name), block_id)

    @property
    def has_moves(self) -> bool:
        """True if the next step has something to move, for which it is sent if need be. Files can
        wait."""
        return self.tier is not None and self.tier.has_moves

    def take_moves(self, tag: bytes) -> tuple[StepValues, ...]:
        """Return what the step that is sent now moves. tag: of the hashes."""
        return () if self.blocks is None else self.blocks.take_moves(tag)

    def fail_moves(self, outputs: Iterable[SchedulerOutput]) -> None:
        """Forget what failed steps, and the one that was being planned, were to move."""
        if self.blocks is not None:
            self.blocks.fail(outputs)

    def forget_all(self) -> None:
        """Forget all contents."""
        if self.blocks is not None:
            self.blocks.forget_all()

    def restore_tier(self, slots: CachedBlocks) -> int:
        """Take the contents of the slots that an earlier driver has filled; return how many."""
        return 0 if self.tier is None else self.tier.restore(slots)

    def note_fetched(self, keys: Iterable[bytes]) -> None:
        """Note contents that all ranks have read from files."""
        if self.files is not None:
            self.files.fetched(keys)


def keys_of(hashes: Sequence[bytes], num_groups: int) -> Iterator[bytes]:
    """Yield the keys of hashes in all groups."""
    for group in range(num_groups):
        yield from (key_of(group, each) for each in hashes)


def key_of(group: int, block_hash: bytes) -> bytes:
    """Return the key of a block's contents."""
    return block_hash + bytes((group,))
