"""A place outside of the KV cache for the contents of blocks, as RequestBlocks sees it
(host_tier.py, filed_blocks.py). A key is a block's hash and a byte for its KV group."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from worker_client.scheduler_output import SchedulerOutput, StepValues


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


def keys_of(hashes: Sequence[bytes], num_groups: int) -> Iterator[bytes]:
    """Yield the keys of hashes in all groups."""
    for group in range(num_groups):
        yield from (key_of(group, each) for each in hashes)


def key_of(group: int, block_hash: bytes) -> bytes:
    """Return the key of a block's contents."""
    return block_hash + bytes((group,))
