"""Blocks of the host tier that go to other groups, or come from them. Contents are named by their
keys: a hash of the tokens and all that decides their KV, and a byte for the KV group. Groups of one
model whose weights have the same number and contents have the same keys."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.host_tier import TierSlots

KeysOf: TypeAlias = Callable[[str], list[bytes]]
"""Returns the keys of the blocks that a request may begin with."""


class HeldBlock(NamedTuple):
    """Contents, and their slot."""

    key: bytes
    slot: int


class HostBlockExchange:
    """A view of the scheduler's host tier. Belongs to its thread."""

    def __init__(self, tier: TierSlots, pool: BlockPool, keys_of: KeysOf) -> None:
        self._tier = tier
        self._pool = pool
        self._keys_of = keys_of

    @property
    def num_slots(self) -> int:
        """Slots that other groups read, or fill: nothing takes them."""
        return self._tier.num_exchanged

    def lacking(self, req_id: str) -> list[bytes]:
        """Return the keys of the blocks that an unfinished request could begin with, and that are
        neither in the KV cache nor in host memory, in its order."""
        found = self._pool.contents(0)
        keys = self._keys_of(req_id)
        return [key for key in keys if key[:-1] not in found and key not in self._tier]

    def stage(self, keys: Sequence[bytes]) -> list[HeldBlock]:
        """Keep the first of these contents in host memory for another group, up to one that is not
        there: until release(). The next step stores those that only the KV cache has."""
        staged = []
        for key in keys:
            slot = self._tier.pin(key, self._pool.find(key[-1], key[:-1]))
            if slot is None:
                break
            staged.append(HeldBlock(key, slot))
        return staged

    def release(self, keys: Iterable[bytes]) -> None:
        """Undo stage()."""
        for key in keys:
            self._tier.unpin(key)

    def reserve(self, keys: Sequence[bytes]) -> list[HeldBlock]:
        """Give slots to the first of these contents, up to one that is here, or finds no room: the
        caller has them filled, and then calls fill() or give_back()."""
        reserved = []
        for key in keys:
            slot = self._tier.reserve(key)
            if slot is None:
                break
            reserved.append(HeldBlock(key, slot))
        return reserved

    def fill(self, keys: Iterable[bytes]) -> None:
        """Let requests load contents whose slots have been filled on all ranks."""
        for key in keys:
            self._tier.fill(key)

    def give_back(self, keys: Iterable[bytes]) -> None:
        """Give up the slots of contents that have not come."""
        for key in keys:
            self._tier.give_back(key)
