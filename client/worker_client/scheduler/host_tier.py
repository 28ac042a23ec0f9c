"""The host tier as the scheduler sees it: which contents are in which slot of the ranks' host
memory, and what the step that is being planned moves. Every rank does the same moves, so slots are
the driver's, as blocks are."""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HostMoves, MovedBlocks
from worker_client.steps.cached_blocks import CachedBlocks


class TierSlots:
    """See OutsidePlace: slots and their contents, the least recently used first. A key names
    contents: it has a block's hash and KV group. All keys have one length. Owned by OutsideBlocks,
    or by vLLM's side.

    Contents that are loaded stay in their slot: when their block is evicted again, nothing has to
    be copied.
    """

    def __init__(self, num_slots: int) -> None:
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._num_slots = num_slots
        self._num_taken = 0
        """Slots from here on were never used."""
        self._unused: list[int] = []
        """Slots below _num_taken without contents."""
        self._stores: dict[bytes, tuple[int, int]] = {}
        """Block and slot of what the next step stores. No step before it may load them."""
        self._loads: dict[int, tuple[int, bytes]] = {}
        """Slot and key of what the next step loads, by block."""
        self._beside: dict[int, bytes] = {}
        """Keys of what is loaded beside steps, by block, until it has arrived: pinned."""
        self._busy: set[int] = set()
        """Slots that the next step names."""
        self._pinned: Counter[bytes] = Counter()
        """Contents that are being sent to other groups: they stay in their slots."""
        self._reserved: dict[bytes, tuple[int, int]] = {}
        """Slot of contents that are being received, and _num_forgotten at that time."""
        self._num_forgotten = 0
        """Calls of forget_all()."""

    @property
    def room(self) -> int:
        """Number of blocks that the next step may still load."""
        return MAX_MOVED_BLOCKS - len(self._loads)

    def __contains__(self, key: bytes) -> bool:
        """Return True if the next step can load contents."""
        return key in self._slot_of and key not in self._stores

    def keep(self, keys: Iterable[bytes]) -> None:
        """Evict none of these contents, which are there, before the next step."""
        for key in keys:
            self._slot_of.move_to_end(key)
            self._busy.add(self._slot_of[key])

    def load(self, key: bytes, block_id: int) -> None:
        """Load contents that are kept into a block with the next step."""
        # Of several loads of a block, the last counts.
        self._loads[block_id] = (self._slot_of[key], key)

    def load_beside(self, block_ids: Iterable[int]) -> set[int]:
        """Do those loads of the next step beside steps that are into these blocks; return them.
        Their contents stay in their slots until has_arrived()."""
        chosen = {block_id for block_id in block_ids if block_id in self._loads}
        for block_id in chosen:
            key = self._beside[block_id] = self._loads[block_id][1]
            self._pinned[key] += 1
        return chosen

    @property
    def loading_beside(self) -> Collection[int]:
        """Blocks that are loaded beside steps, until has_arrived()."""
        return self._beside.keys()

    def has_arrived(self, block_id: int) -> None:
        """Note that a block was loaded, or will not be."""
        key = self._beside.pop(block_id, None)
        if key is not None:
            self.unpin(key)

    def cancel_load(self, block_id: int) -> None:
        """See OutsidePlace."""
        self._loads.pop(block_id, None)
        self.has_arrived(block_id)

    def offer(self, key: bytes, block_id: int) -> None:
        """See OutsidePlace. Blocks are stored when they are evicted."""

    def blocks_lost(self) -> None:
        """See OutsidePlace."""
        for key in [*self._stores]:
            self._remove(key)
        self._stores.clear()

    def evict(self, key: bytes, block_id: int) -> None:
        """Store the contents that a block is about to lose, unless they are there."""
        if key in self._slot_of:
            self._slot_of.move_to_end(key)
            return
        if block_id in self._loads or len(self._stores) == MAX_MOVED_BLOCKS:
            return  # it has not got them yet; or the step has enough to do
        slot = self._take_slot()
        if slot is not None:
            self._slot_of[key] = slot
            self._busy.add(slot)
            self._stores[key] = (block_id, slot)

    @property
    def has_moves(self) -> bool:
        """True if the next step has something to move."""
        return bool(self._stores or self._loads)

    @property
    def num_exchanged(self) -> int:
        """Slots that other groups read, or fill."""
        return len(self._pinned) + len(self._reserved)

    def pin(self, key: bytes, block_id: int | None) -> int | None:
        """Keep contents in their slot until unpin(), and return it; None if they are in none, or no
        slot is free for those of a block, which the next step then stores."""
        if key not in self._slot_of and block_id is not None:
            self.evict(key, block_id)
        slot = self._slot_of.get(key)
        if slot is not None:
            self._slot_of.move_to_end(key)
            self._pinned[key] += 1
        return slot

    def unpin(self, key: bytes) -> None:
        """Undo a pin() of contents, unless they were forgotten since."""
        if self._pinned[key] <= 1:
            del self._pinned[key]
        else:
            self._pinned[key] -= 1

    def slot_of(self, key: bytes) -> int | None:
        """Return the slot that contents are in, or will be with the next step; None: in none."""
        return self._slot_of.get(key)

    def is_coming(self, key: bytes) -> bool:
        """Return True if contents come from another group."""
        return key in self._reserved

    def reserve(self, key: bytes) -> int | None:
        """Return a slot for contents that come from another group, until fill() or give_back();
        None if they are on their way, or no slot is free."""
        if key in self._reserved:
            return None
        slot = self._take_slot()
        if slot is not None:
            self._reserved[key] = slot, self._num_forgotten
        return slot

    def fill(self, key: bytes) -> None:
        """Note that contents have come, unless they are in a slot already, or all were forgotten
        since they were asked for."""
        slot, num_forgotten = self._reserved.pop(key)
        if key in self._slot_of or num_forgotten != self._num_forgotten:
            self._unused.append(slot)
        else:
            self._slot_of[key] = slot

    def give_back(self, key: bytes) -> None:
        """Note that contents have not come."""
        self._unused.append(self._reserved.pop(key)[0])

    def take_moves(self, tag: bytes) -> tuple[HostMoves, ...]:
        """Return what the step that is sent now moves."""
        if not (self._stores or self._loads):
            return ()
        keys = tuple(self._stores)
        blocks, slots = zip(*self._stores.values(), strict=True) if keys else ((), ())
        stored = MovedBlocks(blocks, slots, keys)
        loads = self._loads
        if self._beside:
            loads = dict(sorted(loads.items(), key=lambda each: each[0] in self._beside))
        num_beside = sum(block_id in self._beside for block_id in loads)
        sources = loads.values()
        loaded = MovedBlocks(
            tuple(loads), tuple(slot for slot, _ in sources), tuple(key for _, key in sources)
        )
        self._forget_plan()
        return (HostMoves(tag, stored, loaded, num_beside),)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> None:
        """Forget what failed steps, and the one that was being planned, were to store."""
        self.blocks_lost()
        for key, slot in _stored_by(outputs):
            if self._slot_of.get(key) == slot:
                self._remove(key)
        self._forget_plan()
        for block_id in [*self._beside]:
            self.has_arrived(block_id)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget contents that cannot be trusted. Call it between steps."""
        for key in keys:
            if key in self._slot_of:
                self._stores.pop(key, None)
                self._remove(key)

    def forget_all(self) -> None:
        """Forget all contents, those on their way too."""
        self._num_forgotten += 1
        self.forget([*self._slot_of])
        for block_id in self._loads:
            self.has_arrived(block_id)
        self._forget_plan()

    def restore(self, slots: CachedBlocks) -> int:
        """Take the contents that an earlier driver has left, before the first step, or after all
        were forgotten; return how many. slots: with their numbers as block ids."""
        reserved = {slot for slot, _ in self._reserved.values()}
        raw, width = slots.hashes.tobytes(), slots.hashes.shape[1]
        for index, slot in enumerate(slots.block_ids.tolist()):
            key = raw[index * width : (index + 1) * width]
            if slot < self._num_slots and slot not in reserved and key not in self._slot_of:
                self._slot_of[key] = slot
        taken = {*self._slot_of.values()} | reserved
        self._num_taken = max(taken, default=-1) + 1
        self._unused = [slot for slot in range(self._num_taken) if slot not in taken]
        return len(self._slot_of)

    def _take_slot(self) -> int | None:
        """Return a slot without contents, or that of the least recently used ones; None if the next
        step or other groups need all."""
        for place in reversed(range(len(self._unused))):
            if self._unused[place] not in self._busy:
                return self._unused.pop(place)
        if self._num_taken < self._num_slots:
            self._num_taken += 1
            return self._num_taken - 1
        for key, slot in self._slot_of.items():
            if slot not in self._busy and key not in self._pinned:
                del self._slot_of[key]
                return slot
        return None

    def _remove(self, key: bytes) -> None:
        self._pinned.pop(key, None)
        self._unused.append(self._slot_of.pop(key))

    def _forget_plan(self) -> None:
        self._stores.clear()
        self._loads.clear()
        self._busy.clear()


def _stored_by(outputs: Iterable[SchedulerOutput]) -> Iterator[tuple[bytes, int]]:
    for output in outputs:
        for each in output.extensions:
            if isinstance(each, HostMoves):
                yield from zip(each.stored.hashes, each.stored.slots, strict=True)
