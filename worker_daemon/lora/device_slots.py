"""Adapter slots in device memory. Adapters that a step needs replace the least recently used ones.

Copies are queued on the stream that steps run on: a slot is written after all earlier steps, and
before the step that needs it.
"""

from collections.abc import Sequence

from torch import Tensor

from worker_daemon.lora.host_store import HostAdapter


class DeviceSlots:
    """The device slots and the adapter that each holds. Owned by the loaded model; used on the step
    thread. The memory is the model's."""

    def __init__(self, slots: Tensor) -> None:
        """slots [L, slot_size]"""
        self._slots = slots
        self._held: list[HostAdapter | None] = [None] * slots.shape[0]
        self._last_uses = [0] * slots.shape[0]
        self._num_uses = 0
        self.num_copies = 0
        """Adapters copied to the device so far."""

    @property
    def size_bytes(self) -> int:
        return self._slots.numel() * self._slots.element_size()

    def place(self, adapters: Sequence[HostAdapter]) -> list[int]:
        """Return the slots of these adapters: at most L, all different. Queues copies for those
        that have no slot yet."""
        self._num_uses += 1
        wanted = {adapter.serial for adapter in adapters}
        there = {held.serial: slot for slot, held in enumerate(self._held) if held is not None}
        free = [slot for serial, slot in there.items() if serial not in wanted]
        free += [slot for slot, held in enumerate(self._held) if held is None]
        free.sort(key=self._worth, reverse=True)
        placed = []
        for adapter in adapters:
            slot = there.get(adapter.serial)
            if slot is None:
                slot = free.pop()
                self._slots[slot].copy_(adapter.weights, non_blocking=True)
                self._held[slot] = adapter
                self.num_copies += 1
            self._last_uses[slot] = self._num_uses
            placed.append(slot)
        return placed

    def refresh(self, adapter: HostAdapter) -> None:
        """Queue a copy of an adapter whose weights have changed, to the slot that holds it: later
        steps read the new ones there."""
        if adapter in self._held:
            self._slots[self._held.index(adapter)].copy_(adapter.weights, non_blocking=True)
            self.num_copies += 1

    def forget(self) -> None:
        """Mark all slots as empty, because the memory has lost its content."""
        self._held = [None] * len(self._held)

    def _worth(self, slot: int) -> tuple[bool, bool, int]:
        """Return a sort key for eviction: empty slots first, then unpinned ones, then pinned ones,
        each by last use."""
        held = self._held[slot]
        return held is not None, held is not None and held.is_pinned, self._last_uses[slot]
