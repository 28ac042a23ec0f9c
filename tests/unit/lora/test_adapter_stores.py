"""Host memory and device slots: eviction, and the adapters that a step finds in its slots."""

import threading

import numpy as np
import pytest
import torch

from rpc_schema.errors import CapacityError, ConfigError
from tests.support.waiting import PATIENCE_S
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.lora.adapter_config import ModuleScale
from worker_daemon.lora.adapter_files import AdapterFiles
from worker_daemon.lora.device_slots import DeviceSlots
from worker_daemon.lora.host_store import HostAdapter, HostStore
from worker_daemon.lora.reader import MAX_PREPARED, AdapterReader

IDENTITY = SourceIdentity(b"files")


def adapter(lora_id, version=1):
    weights = torch.full((4,), float(1000 * lora_id + version))
    return HostAdapter(f"a{lora_id}", lora_id, version, {}, weights, IDENTITY)


def ids(store):
    return [each.lora_id for each in store.adapters()]


def test_the_least_recently_used_leaves_and_pinned_ones_never():
    store = HostStore(3)
    assert [store.add(adapter(number)) for number in (1, 2, 3)] == [None] * 3
    assert store.find(1, 1) is not None
    assert store.find(2, 7) is None, "another version"
    assert store.add(adapter(4)) == 2
    assert store.touch("a3", 3) is not None
    assert ids(store) == [1, 4, 3]
    store.pin(1)
    assert store.add(adapter(5)) == 4
    store.pin(3)
    store.pin(5)
    with pytest.raises(CapacityError, match="pinned"):
        store.add(adapter(6))
    assert sorted(ids(store)) == [1, 3, 5]
    assert store.add(adapter(5, version=2)) is None, "replaced, not one more"
    assert store.find(5, 1) is None and store.find(5, 2).is_pinned
    assert store.remove(3) and not store.remove(3)
    assert store.add(adapter(6)) is None
    with pytest.raises(ConfigError, match="no such adapter"):
        store.pin(9)


def test_an_id_and_a_name_belong_to_one_adapter():
    store = HostStore(3)
    store.add(adapter(1))
    for name, lora_id in (("a1", 2), ("other", 1)):
        with pytest.raises(ConfigError, match="has id 1"):
            store.touch(name, lora_id)
    assert store.touch("other", 2) is None


def test_steps_find_their_adapters_in_different_slots():
    """Against a model of least recently used slots; pinned ones stay while others can leave."""
    rng = np.random.default_rng(8)
    store, buffer = HostStore(9), torch.zeros(4, 4)
    slots = DeviceSlots(buffer)
    for number in range(1, 10):
        store.add(adapter(number))
    store.pin(9)
    uses = {}
    for step in range(1, 400):
        wanted = rng.choice(np.arange(1, 10), rng.integers(0, 5), replace=False).tolist()
        placed = slots.place([store.find(number, 1) for number in wanted])
        assert len(set(placed)) == len(wanted)
        assert buffer[placed].tolist() == [[1000.0 * number + 1] * 4 for number in wanted]
        uses |= dict.fromkeys(wanted, step)
        held = {int(value) // 1000 for value in buffer[:, 0].tolist()} - {0}
        assert len(held) == min(4, len(uses)) and held >= set(wanted)
        worth = {number: (number == 9, last) for number, last in uses.items()}
        kept = [worth[number] for number in held - set(wanted)]
        assert all(worth[left] <= each for left in uses.keys() - held for each in kept), step
        uses = {number: uses[number] for number in held}
    before = slots.num_copies
    slots.place([store.find(number, 1) for number in uses])
    assert slots.num_copies == before
    buffer.zero_()
    slots.forget()
    (place,) = slots.place([store.find(9, 1)])
    assert buffer[place, 0] == 9001.0


class Disk:
    """Reads scripted adapters once it is allowed to."""

    def __init__(self):
        self.may_read = threading.Event()
        self.names = []

    def __call__(self, name):
        self.names.append(name)
        assert self.may_read.wait(PATIENCE_S)
        if name == "bad":
            raise ConfigError("it is bad")
        return AdapterFiles(torch.zeros(1), {"m": ModuleScale(len(self.names), 1.0)}, IDENTITY)


def prepared(reader, name, version):
    while not reader.prepare(name, version):
        pass


def test_adapters_are_read_ahead():
    disk = Disk()
    reader = AdapterReader(disk, lambda name, identity: False)
    assert not reader.prepare("a", 1)
    assert not reader.prepare("a", 1)
    disk.may_read.set()
    prepared(reader, "a", 1)
    assert reader.take("a", 1).modules["m"].rank == 1
    assert disk.names == ["a"], "read once"
    reader.take("a", 1)
    prepared(reader, "a", 2)
    reader.take("a", 3)
    assert len(disk.names) == 4, "nothing of another version is used"
    with pytest.raises(ConfigError, match="it is bad"):
        prepared(reader, "bad", 1)
    with pytest.raises(ConfigError, match="it is bad"):
        prepared(reader, "bad", 1)
    disk.may_read.clear()
    for number in range(MAX_PREPARED):
        assert not reader.prepare(f"b{number}", 1)
    with pytest.raises(CapacityError, match="being read"):
        reader.prepare("one more", 1)
    disk.may_read.set()
    reader.drop_all()
    prepared(reader, "one more", 1)
