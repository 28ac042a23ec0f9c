"""A loaded model's LoRA adapters: layout, host memory, device slots and file reader."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.errors import config_error
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.lora.adapter_update import AdapterUpdate
from worker_daemon.lora.device_slots import DeviceSlots
from worker_daemon.lora.host_store import HostAdapter, HostStore
from worker_daemon.lora.reader import AdapterReader


class Added(NamedTuple):
    """Result of adding an adapter."""

    version: int
    """The version in host memory now."""
    identity: SourceIdentity
    """Identity of the files that this version was read from, or of the updates since."""
    evicted: int | None = None
    """Id of the adapter that was evicted to make room."""
    files_changed: bool = False
    """True if its files have changed since, and it was not updated."""
    weights_version: int = 0
    """Number of its latest update; 0: it is as its files were."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a loaded model. Owned by it; used on the step thread."""

    layout: AdapterLayout
    shapes: Mapping[str, tuple[int, int]]
    """(output, input features) of every module of the whole model that adapters may change."""
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
            was_read = not there.weights_version
            changed = was_read and self.reader.has_changed(name, there.identity)
            return Added(
                there.version,
                there.identity,
                files_changed=changed,
                weights_version=there.weights_version,
            )
        self.store.check_room(lora_id)
        files = self.reader.take(name, version)
        adapter = HostAdapter(name, lora_id, version, files.modules, files.weights, files.identity)
        return Added(version, files.identity, self.store.add(adapter))

    def update(self, lora_id: int) -> AdapterUpdate:
        """Begin to change an adapter's weights. Raises ConfigError if none has that id;
        CapacityError if the host has no memory for another copy."""
        adapter = self.store.get(lora_id)
        if adapter is None:
            raise config_error("lora_id", lora_id, "there is no such adapter", "add it first")
        return AdapterUpdate(self.layout, self.shapes, self.store, self.slots, adapter)
