"""The slots of the ranks' host memory: which contents are in which, the least recently used first,
and who keeps them there. Every rank does the same moves, so slots are the driver's, as blocks
are."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from worker_client.steps.cached_blocks import CachedBlocks


class TierSlots:
    """Owned by HostPlace. A key names contents: it has a block's hash and KV group. All keys have
    one length."""

    def __init__(self, num_slots: int) -> None:
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._num_slots = num_slots
        self._num_taken = 0
        """Slots from here on were never used."""
        self._unused: list[int] = []
        """Slots below _num_taken without contents."""
        self._busy: set[bytes] = set()
        """Contents of slots that the next step names: nothing else goes there before it."""
        self._unused_later: list[int] = []
        """Slots that the next step names, and that have lost their contents."""
        self._pinned: Counter[bytes] = Counter()
        """Contents that stay in their slots: other groups read them, or loads beside steps."""
        self._reserved: dict[bytes, tuple[int, int]] = {}
        """Slot of contents that are being received, and _num_forgotten at that time."""
        self._num_forgotten = 0
        """Calls of forget_all()."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of the contents that are in slots."""
        slot_of = self._slot_of
        return {key for key in keys if key in slot_of}

    def get(self, key: bytes) -> int | None:
        """Return the slot of contents; None if they are in none."""
        return self._slot_of.get(key)

    def slots_of(self, keys: Iterable[bytes]) -> list[int]:
        """Return the slots of contents, which are there."""
        slot_of = self._slot_of
        return [slot_of[key] for key in keys]

    def keep(self, keys: Iterable[bytes]) -> None:
        """Let contents, which are there, be the last to make room, and stay until next_step()."""
        kept = [*keys]
        self.use(kept)
        self._busy.update(kept)

    def use(self, keys: Iterable[bytes]) -> list[bytes]:
        """Let contents be the last to make room, as far as they are there; return the others."""
        slot_of, use, others = self._slot_of, self._slot_of.move_to_end, []
        for key in keys:
            if key in slot_of:
                use(key)
            else:
                others.append(key)
        return others

    def give_way(self, keys: Iterable[bytes]) -> None:
        """Let contents be the first to make room, as far as they are there."""
        for key in keys:
            if key in self._slot_of:
                self._slot_of.move_to_end(key, last=False)

    def put(self, key: bytes) -> int | None:
        """Give contents, which are in no slot, one until next_step() at least, and return it; None
        if all are kept."""
        slot = self._take()
        if slot is not None:
            self._slot_of[key] = slot
            self._busy.add(key)
        return slot

    def remove(self, key: bytes) -> None:
        """Forget contents that are there."""
        self._pinned.pop(key, None)
        unused = self._unused_later if key in self._busy else self._unused
        unused.append(self._slot_of.pop(key))

    def next_step(self) -> None:
        """Note that the next step is another one."""
        self._busy.clear()
        self._unused += self._unused_later
        self._unused_later.clear()

    def pin(self, keys: Iterable[bytes]) -> None:
        """Keep contents, which are there, in their slots until unpin()."""
        self._pinned.update(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Undo a pin() of contents, unless they were forgotten since."""
        pinned = self._pinned
        for key in keys:
            num_left = pinned.pop(key, 0) - 1
            if num_left > 0:
                pinned[key] = num_left

    @property
    def num_exchanged(self) -> int:
        """Slots that are pinned or reserved."""
        return len(self._pinned) + len(self._reserved)

    def is_coming(self, key: bytes) -> bool:
        """Return True if contents come from another group."""
        return key in self._reserved

    def reserve(self, key: bytes) -> int | None:
        """Return a slot for contents that come from another group, until fill() or give_back();
        None if they are on their way, or no slot is free."""
        if key in self._reserved:
            return None
        slot = self._take()
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

    def forget_all(self) -> None:
        """Forget all contents, those on their way too."""
        self._num_forgotten += 1
        for key in [*self._slot_of]:
            self.remove(key)

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

    def _take(self) -> int | None:
        """Return a slot without contents, or that of the least recently used ones; None if the next
        step or other groups need all."""
        if self._unused:
            return self._unused.pop()
        if self._num_taken < self._num_slots:
            self._num_taken += 1
            return self._num_taken - 1
        for key, slot in self._slot_of.items():
            if key not in self._busy and key not in self._pinned:
                del self._slot_of[key]
                return slot
        return None
