"""Adapters in host memory, by id. The least recently used one is evicted first. Only operations and
admissions change it, which all ranks see in the same order, so all ranks hold the same adapters."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from rpc_schema.errors import CapacityError, ConfigError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.lora.adapter_config import ModuleScale


@dataclass(slots=True, eq=False)
class HostAdapter:
    """This rank's shard of an adapter. Its memory lives as long as there is a reference to it:
    requests keep the adapter that they started with."""

    name: str
    lora_id: int
    version: int
    modules: Mapping[str, ModuleScale]
    """Rank and scale of each module of the whole model that it changes."""
    weights: Tensor
    """[slot_size] on the host; an update puts another tensor here."""
    identity: SourceIdentity
    """Identity of the files that it was read from, or of the updates since."""
    weights_version: int = 0
    """Number of its latest update; 0: it is as its files were."""
    is_pinned: bool = False
    serial: int = field(init=False, default=0)
    """Unique number in this process, different for each version of an adapter; from 1 on."""

    @property
    def rank(self) -> int:
        """The largest LoRA rank of its matrices."""
        return max(module.rank for module in self.modules.values())


class HostStore:
    """The adapters in host memory. Owned by the loaded model; used on the step thread."""

    def __init__(self, max_adapters: int) -> None:
        self._max_adapters = max_adapters
        self._adapters: dict[int, HostAdapter] = {}
        """Adapters by id, the least recently used first."""
        self._serials = itertools.count(1)

    def find(self, lora_id: int, version: int) -> HostAdapter | None:
        """Return an adapter and mark it as used, or None if that version is not there."""
        adapter = self._adapters.get(lora_id)
        if adapter is None or adapter.version != version:
            return None
        self._use(adapter)
        return adapter

    def touch(self, name: str, lora_id: int) -> HostAdapter | None:
        """Return the adapter with a name and id and mark it as used, or None if neither is there.

        Raises:
            ConfigError: the id or the name belongs to another adapter.
        """
        for there in self._adapters.values():
            if (there.name == name) != (there.lora_id == lora_id):
                raise ConfigError(
                    f"adapter {there.name!r} has id {there.lora_id}",
                    field="lora_id" if there.lora_id == lora_id else "name",
                    value=lora_id if there.lora_id == lora_id else name,
                    fix="use an id and a name that no other adapter has, or remove that one",
                )
        adapter = self._adapters.get(lora_id)
        if adapter is not None:
            self._use(adapter)
        return adapter

    def get(self, lora_id: int) -> HostAdapter | None:
        """Return the adapter with an id, if there is one; it does not count as used."""
        return self._adapters.get(lora_id)

    def check_room(self, lora_id: int) -> None:
        """Raise CapacityError if an adapter cannot be added because all others are pinned."""
        if lora_id in self._adapters or len(self._adapters) < self._max_adapters:
            return
        if all(adapter.is_pinned for adapter in self._adapters.values()):
            raise CapacityError(
                f"all {self._max_adapters} adapters in host memory are pinned",
                field="lora_id",
                value=lora_id,
                fix="remove one, or load the model with a larger max_cpu_loras",
            )

    def add(self, adapter: HostAdapter) -> int | None:
        """Add or replace an adapter; return the id of the evicted one, if any. Raises as
        check_room does, with nothing changed."""
        self.check_room(adapter.lora_id)
        former = self._adapters.pop(adapter.lora_id, None)
        evicted: int | None = None
        if former is not None:
            adapter.is_pinned = former.is_pinned
        elif len(self._adapters) == self._max_adapters:
            unpinned = (each for each in self._adapters.values() if not each.is_pinned)
            evicted = next(unpinned).lora_id
            del self._adapters[evicted]
        adapter.serial = next(self._serials)
        self._adapters[adapter.lora_id] = adapter
        return evicted

    def remove(self, lora_id: int) -> bool:
        """Remove an adapter; return False if no adapter has that id."""
        return self._adapters.pop(lora_id, None) is not None

    def pin(self, lora_id: int) -> None:
        """Pin an adapter, so that it is never evicted. Raises ConfigError if none has that id."""
        adapter = self._adapters.get(lora_id)
        if adapter is None:
            raise ConfigError(
                "there is no such adapter",
                field="lora_id",
                value=lora_id,
                fix="add it first",
            )
        adapter.is_pinned = True
        self._use(adapter)

    def adapters(self) -> list[HostAdapter]:
        """Return all adapters, the least recently used first."""
        return list(self._adapters.values())

    def _use(self, adapter: HostAdapter) -> None:
        self._adapters[adapter.lora_id] = self._adapters.pop(adapter.lora_id)
