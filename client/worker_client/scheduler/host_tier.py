"""The host tier as the scheduler sees it: what the step that is being planned moves between the KV
cache and the slots of host memory (tier_slots.py)."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.scheduler.tier_slots import TierSlots
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HostMoves, MovedBlocks


class HostPlace:
    """See OutsidePlace. Owned by OutsideBlocks, or by vLLM's side.

    Contents that are loaded stay in their slot: when their block is evicted again, nothing has to
    be copied.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = TierSlots(num_slots)
        self._stores: dict[bytes, tuple[int, int]] = {}
        """Block and slot of what the next step stores. No step before it may load them."""
        self._filled: dict[bytes, tuple[int, int]] = {}
        """Likewise, of blocks that the next step fills."""
        self._loads: dict[int, bytes] = {}
        """Keys of what the next step loads, by block."""
        self._sources: dict[int, int] = {}
        """Slots of the same, in the same order."""
        self._beside: dict[int, bytes] = {}
        """Keys of what is loaded beside steps, by block, until it has arrived: pinned."""

    @property
    def room(self) -> int:
        """Number of blocks that the next step may still load."""
        return MAX_MOVED_BLOCKS - len(self._loads)

    @property
    def has_moves(self) -> bool:
        """True if the next step has something to move."""
        return bool(self._stores or self._filled or self._loads)

    def __contains__(self, key: bytes) -> bool:
        """Return True if the next step can load contents."""
        return key in self.slots and key not in self._stores

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """See OutsidePlace."""
        held = self.slots.held(keys)
        return held - self._stores.keys() if self._stores else held

    def keep(self, keys: Iterable[bytes]) -> None:
        """See OutsidePlace."""
        self.slots.keep(keys)

    def load(self, contents: Mapping[int, bytes]) -> None:
        """See OutsidePlace."""
        # Of several loads of a block, the last counts.
        self._loads.update(contents)
        self._sources.update(zip(contents, self.slots.slots_of(contents.values()), strict=True))

    def load_beside(self, block_ids: Iterable[int]) -> set[int]:
        """Do those loads of the next step beside steps that are into these blocks; return them.
        Their contents stay in their slots until have_arrived()."""
        chosen = self._loads.keys() & block_ids
        keys = [self._loads[block_id] for block_id in chosen]
        self.have_arrived(self._beside.keys() & chosen)  # what was to come before
        self._beside.update(zip(chosen, keys, strict=True))
        self.slots.pin(keys)
        return chosen

    @property
    def loading_beside(self) -> Collection[int]:
        """Blocks that are loaded beside steps, until have_arrived()."""
        return self._beside.keys()

    def have_arrived(self, block_ids: Iterable[int]) -> None:
        """Note that blocks were loaded, or will not be."""
        beside = self._beside
        self.slots.unpin([beside.pop(block_id) for block_id in block_ids if block_id in beside])

    def cancel_loads(self, block_ids: Collection[int]) -> None:
        """See OutsidePlace."""
        cancelled = [each for each in block_ids if self._loads.pop(each, None) is not None]
        for block_id in cancelled:
            del self._sources[block_id]
        self.have_arrived(cancelled)

    def offer(self, key: bytes, block_id: int) -> None:
        """See OutsidePlace. Blocks are stored when they are evicted, or shortly before."""

    def blocks_lost(self) -> None:
        """See OutsidePlace."""
        for key in self._stores:
            self.slots.remove(key)
        self._stores.clear()

    def evict(self, contents: Mapping[int, bytes]) -> None:
        """See OutsidePlace. What is there already is not stored again."""
        self.store(contents, MAX_MOVED_BLOCKS)

    def store(self, contents: Mapping[int, bytes], most: int) -> Collection[int]:
        """Store contents with the next step, unless they are there, as long as that stores no more
        than `most` blocks. Return the blocks whose contents stay outside: they have not got them
        yet, the step has enough to do, or all slots are kept."""
        others = self.slots.use(contents.values())
        if not others:
            return ()
        lacking = {*others}
        return [
            block_id
            for block_id, key in contents.items()
            if key in lacking and not self._store(block_id, key, most)
        ]

    def _store(self, block_id: int, key: bytes, most: int) -> bool:
        if block_id in self._loads or len(self._stores) >= most:
            return False
        slot = self.slots.put(key)
        if slot is not None:
            self._stores[key] = (block_id, slot)
        return slot is not None

    def pin(self, key: bytes, block_id: int | None, *, is_filled: bool = False) -> int | None:
        """Keep contents in their slot until TierSlots.unpin(), and return it; None if they are in
        none, or no slot is free for those of a block, which the next step then stores. is_filled:
        it is that step which fills the block, and which is planned but for its moves."""
        if block_id is not None and is_filled:
            self._store_filled(key, block_id)
        elif block_id is not None:
            self.evict({block_id: key})
        slot = self.slots.get(key)
        if slot is not None:
            self.slots.use((key,))
            self.slots.pin((key,))
        return slot

    def _store_filled(self, key: bytes, block_id: int) -> None:
        is_full = len(self._stores) + len(self._filled) >= MAX_MOVED_BLOCKS
        if key in self.slots or is_full:
            return
        slot = self.slots.put(key)
        if slot is not None:
            self._filled[key] = (block_id, slot)

    def take_moves(self, tag: bytes) -> tuple[HostMoves, ...]:
        """See OutsidePlace."""
        if not (self._stores or self._filled or self._loads):
            return ()
        stores = {**self._stores, **self._filled} if self._filled else self._stores
        keys = tuple(stores)
        blocks, slots = zip(*stores.values(), strict=True) if keys else ((), ())
        stored = MovedBlocks(blocks, slots, keys)
        order: Sequence[int] = tuple(self._loads)
        beside = self._loads.keys() & self._beside.keys()
        if 0 < len(beside) < len(order):
            order = sorted(order, key=beside.__contains__)
        sources = tuple(map(self._sources.__getitem__, order))
        loaded = MovedBlocks(order, sources, tuple(map(self._loads.__getitem__, order)))
        moves = HostMoves(tag, stored, loaded, len(beside), num_filled=len(self._filled))
        self._forget_plan()
        return (moves,)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> None:
        """See OutsidePlace. What failed steps were to store may not be there."""
        self.blocks_lost()
        for key, slot in _stored_by(outputs):
            if self.slots.get(key) == slot:
                self.slots.remove(key)
        self._forget_plan()
        self.have_arrived([*self._beside])

    def forget(self, keys: Iterable[bytes]) -> None:
        """See OutsidePlace."""
        for key in self.slots.held(keys):
            self._stores.pop(key, None)
            self._filled.pop(key, None)
            self.slots.remove(key)

    def forget_all(self) -> None:
        """See OutsidePlace. What comes from other groups is forgotten too."""
        self.slots.forget_all()
        self.have_arrived([*self._loads])
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._stores.clear()
        self._filled.clear()
        self._loads.clear()
        self._sources.clear()
        self.slots.next_step()


def _stored_by(outputs: Iterable[SchedulerOutput]) -> Iterator[tuple[bytes, int]]:
    for output in outputs:
        for each in output.extensions:
            if isinstance(each, HostMoves):
                yield from zip(each.stored.hashes, each.stored.slots, strict=True)
