"""Blocks of the host tier that come from other groups, by the names of their contents
(content_names.py), or go to them (outgoing_contents.py)."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.group.kv_transfers import ExchangedBlocks
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.content_names import ContentNames, HeldContents
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler.host_tier import HostPlace
from worker_client.scheduler.outgoing_contents import OutgoingContents, StepNumbers

KeysOf: TypeAlias = Callable[[str, int], list[bytes]]
"""Returns the keys of the blocks that a request may begin with once it has so many more tokens."""


class HostBlockExchange:
    """A view of the scheduler's host tier. Belongs to its thread."""

    def __init__(
        self,
        tier: HostPlace,
        pool: BlockPool,
        keys_of: KeysOf,
        names: ContentNames,
        steps: StepNumbers,
        files: FetchedBlocks | None = None,
    ) -> None:
        """files: what has been read from them need not come from another group."""
        self.outgoing = OutgoingContents(tier, pool, names, steps)
        """Blocks that other groups get."""
        self._tier = tier
        self._slots = tier.slots
        self._pool = pool
        self._keys_of = keys_of
        self._names = names
        self._files = files

    @property
    def tag(self) -> bytes:
        """With equal tags, equal names mean equal contents."""
        return self._names.tag

    @property
    def needs_all(self) -> bool:
        """True if a part of what a request lacks is of no use to it."""
        return self._names.has_windows

    @property
    def num_slots(self) -> int:
        """Slots that other groups read, or fill: nothing takes them."""
        return self._slots.num_exchanged

    def lacking(self, req_id: str, *, has_token: bool = False) -> list[bytes]:
        """Return the names of the contents that an unfinished request could begin with, and that
        are neither in the KV cache, nor in host memory, nor read from files, in its order.
        has_token: if there are any, and a part of them is of use, also those for the time when the
        request has one token more."""
        found = self._lacking(self._keys_of(req_id, 0))
        if found and has_token and not self.needs_all:
            found = self._lacking(self._keys_of(req_id, 1))
        return found

    def reserve(self, names: Sequence[bytes]) -> list[HeldContents]:
        """Give slots to the first of these contents that find room, or to none if all are needed,
        but for those that are here or on their way: the caller has the slots filled, and then calls
        fill() or give_back()."""
        reserved: list[HeldContents] = []
        num_slots = 0
        for name in names:
            keys = self._names.keys_of(name)
            if all(map(self._has, keys)) or any(map(self._slots.is_coming, keys)):
                continue
            num_slots += len(keys)
            slots = self._reserve(keys) if num_slots <= MAX_MOVED_BLOCKS else None
            if slots is None:
                if self.needs_all:
                    self.give_back([each.name for each in reserved])
                    reserved = []
                break
            reserved.append(HeldContents(name, slots))
        return reserved

    def fill(self, names: Iterable[bytes]) -> None:
        """Let requests load contents whose slots have been filled on all ranks."""
        for name in names:
            for key in self._names.keys_of(name):
                self._slots.fill(key)

    def give_back(self, names: Iterable[bytes]) -> None:
        """Give up the slots of contents that have not come."""
        for name in names:
            for key in self._names.keys_of(name):
                self._slots.give_back(key)

    def blocks_of(self, contents: Iterable[HeldContents]) -> ExchangedBlocks:
        """Return the blocks of contents."""
        rows = [
            (slot, key, each.name)
            for each in contents
            for slot, key in zip(each.slots, self._names.keys_of(each.name), strict=True)
        ]
        return ExchangedBlocks(
            [slot for slot, _, _ in rows],
            [key for _, key, _ in rows],
            bytes(key[-1] for _, key, _ in rows),
            [name for _, _, name in rows],
        )

    def _lacking(self, keys: Iterable[bytes]) -> list[bytes]:
        return [*dict.fromkeys(self._names.name_of(key) for key in keys if not self._has(key))]

    def _has(self, key: bytes) -> bool:
        if self._pool.find(key[-1], key[:-1]) is not None or key in self._tier:
            return True
        return self._files is not None and key in self._files

    def _reserve(self, keys: Sequence[bytes]) -> tuple[int, ...] | None:
        """Give a slot to each block; return them, or None if there is no room for one."""
        slots = []
        for index, key in enumerate(keys):
            slot = self._slots.reserve(key)
            if slot is None:
                for reserved in keys[:index]:
                    self._slots.give_back(reserved)
                return None
            slots.append(slot)
        return tuple(slots)
