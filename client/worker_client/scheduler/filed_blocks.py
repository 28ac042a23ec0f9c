"""Blocks in files as the scheduler sees them: which contents the ranks have read for it, and what
the step that is being planned moves. Which files there are is each rank's own affair."""

from collections.abc import Collection, Iterable, Mapping

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HashedBlocks, KVFileMoves


class FetchedBlocks:
    """See OutsidePlace. Owned by OutsideBlocks.

    Every block that was offered is stored once: the ranks know which they have. A load uses up what
    was fetched.
    """

    def __init__(self) -> None:
        self._fetched: set[bytes] = set()
        """Contents that all ranks have in host memory."""
        self._offered: dict[int, bytes] = {}
        """Keys of what the next step stores, by block."""
        self._loads: dict[int, bytes] = {}
        """Keys of what the next step loads, by block."""

    @property
    def room(self) -> int:
        """See OutsidePlace."""
        return MAX_MOVED_BLOCKS - len(self._loads)

    def __contains__(self, key: bytes) -> bool:
        """Return True if the next step can load contents."""
        return key in self._fetched

    def fetched(self, keys: Iterable[bytes]) -> None:
        """Note contents that all ranks have read."""
        self._fetched.update(keys)

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """See OutsidePlace."""
        return self._fetched.intersection(keys)

    def keep(self, keys: Iterable[bytes]) -> None:
        """See OutsidePlace. Nothing is evicted here."""

    def load(self, contents: Mapping[int, bytes]) -> None:
        """See OutsidePlace."""
        self._fetched.difference_update(contents.values())
        self._loads.update(contents)

    def cancel_loads(self, block_ids: Collection[int]) -> None:
        """See OutsidePlace. The ranks still have the contents."""
        loads = self._loads
        self._fetched.update(loads.pop(each) for each in block_ids if each in loads)

    def offer(self, key: bytes, block_id: int) -> None:
        """See OutsidePlace."""
        if len(self._offered) < MAX_MOVED_BLOCKS:
            self._offered[block_id] = key

    def evict(self, contents: Mapping[int, bytes]) -> None:
        """See OutsidePlace. What was offered is stored before the step writes to the block."""

    def take_moves(self, tag: bytes) -> tuple[KVFileMoves, ...]:
        """See OutsidePlace."""
        if not (self._offered or self._loads):
            return ()
        stored, loaded = self._offered, self._loads
        self._offered, self._loads = {}, {}
        return (KVFileMoves(tag, _columns(stored), _columns(loaded)),)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> None:
        """See OutsidePlace."""
        self._offered.clear()
        self._loads.clear()

    def blocks_lost(self) -> None:
        """See OutsidePlace."""
        self._offered.clear()

    def forget(self, keys: Iterable[bytes]) -> None:
        """See OutsidePlace."""
        lost = {*keys}
        self._fetched -= lost
        self._offered = {block: key for block, key in self._offered.items() if key not in lost}

    def forget_all(self) -> None:
        """See OutsidePlace."""
        self._fetched.clear()
        self._offered.clear()
        self._loads.clear()


def _columns(blocks: dict[int, bytes]) -> HashedBlocks:
    return HashedBlocks(tuple(blocks), tuple(blocks.values()))
