"""A loaded model's LoRA adapters: layout, host memory, device slots and file reader."""

from dataclasses import dataclass
from typing import NamedTuple

from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.lora.device_slots import DeviceSlots
from worker_daemon.lora.host_store import HostAdapter, HostStore
from worker_daemon.lora.reader import AdapterReader


class Added(NamedTuple):
    """Result of adding an adapter."""

    version: int
    """The version in host memory now."""
    identity: SourceIdentity
    """Identity of the files that this version was read from."""
    evicted: int | None = None
    """Id of the adapter that was evicted to make room."""
    files_changed: bool = False
    """True if they have changed since."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a loaded model. Owned by it; used on the step thread."""

    layout: AdapterLayout
    store: HostStore
    slots: DeviceSlots
    reader: AdapterReader

    def add(self, name: str, lora_id: int, version: int, *, load_inplace: bool) -> Added:
        """Add an adapter, or count it as used if it is already there; load_inplace replaces it.

        Raises:
            ConfigError: the id or the name belongs to another adapter, or it is not supported.
            CheckpointError: its files are faulty.
            CapacityError: all adapters are pinned, or the host has no memory for it.
        """
        there = self.store.touch(name, lora_id)
        if there is not None and not load_inplace:
            self.reader.drop(name)
            changed = self.reader.has_changed(name, there.identity)
            return Added(there.version, there.identity, files_changed=changed)
        self.store.check_room(lora_id)
        files = self.reader.take(name, version)
        adapter = HostAdapter(name, lora_id, version, files.rank, files.weights, files.identity)
        return Added(version, files.identity, self.store.add(adapter))
