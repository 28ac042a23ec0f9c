"""Arenas over the host's memory, the driver calls of those over a GPU's, and the host memory that
content sleeps in."""

import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rpc_schema.errors import CapacityError, ConfigError, DeviceError
from tests.support.waiting import PATIENCE_S
from worker_daemon.device.arena import ALIGNMENT_BYTES, Arena, arena_bytes, open_arena
from worker_daemon.device.backup import RESERVE_BYTES, HostBackup, host_room_bytes
from worker_daemon.device.cuda_pages import CudaPages
from worker_daemon.device.host_pages import HostPages

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE
MIB = 1 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


class FewPages(HostPages):
    """Has a limited number of bytes at a time."""

    def __init__(self, num_bytes, limit):
        super().__init__(num_bytes)
        self.left = limit

    def map(self, offset, num_bytes):
        if num_bytes > self.left:
            raise CapacityError("none left")
        super().map(offset, num_bytes)
        self.left -= num_bytes

    def unmap(self, offset, num_bytes):
        super().unmap(offset, num_bytes)
        self.left += num_bytes


def test_tensors_lie_aligned_beside_each_other_and_are_zero():
    shapes = [
        ((3, 5), torch.float32),
        ((7,), torch.bfloat16),
        ((0,), torch.float32),
        ((2,), torch.int64),
    ]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes]
    arena = open_arena(arena_bytes(sizes), 2 * PAGE, CPU)
    tensors = [arena.take(shape, dtype) for shape, dtype in shapes]
    for tensor, (shape, dtype) in zip(tensors, shapes, strict=True):
        assert (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous()) == (shape, dtype, True)
        assert not tensor.any()
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    for value, tensor in enumerate(tensors, 1):
        tensor.fill_(value)
    for value, tensor in enumerate(tensors, 1):
        assert tensor.eq(value).all()
    with pytest.raises(ValueError, match="arena"):
        arena.take((PAGE,), torch.int64)


def test_addresses_stay_while_memory_goes_back_to_the_system_and_comes_again():
    arena = open_arena(64 * MIB, 16 * MIB, CPU)
    tensor = arena.take((64 * MIB,), torch.uint8)
    address = tensor.data_ptr()
    tensor.fill_(7)
    full = resident_bytes()
    arena.unmap_all()
    assert full - resident_bytes() > 60 * MIB
    assert (arena.is_mapped, arena.mapped_bytes) == (False, 0)
    arena.unmap_all()
    arena.map_all()
    assert arena.mapped_bytes == 64 * MIB
    assert tensor.data_ptr() == address
    assert not tensor.any()
    tensor.fill_(9)
    assert tensor.eq(9).all()


def test_a_view_keeps_the_addresses_when_the_arena_is_gone():
    """They must not be reused: a late view would read another owner's memory."""
    arena = open_arena(PAGE, PAGE, CPU)
    view = arena.take((4,), torch.float32)
    first, last = view.data_ptr(), view.data_ptr() + PAGE
    del arena
    view.fill_(2.0)
    others = [open_arena(PAGE, PAGE, CPU).take((4,), torch.float32) for _ in range(20)]
    assert all(not first <= other.data_ptr() < last for other in others)
    assert view.eq(2.0).all()


def test_memory_that_runs_out_half_way_can_be_given_back():
    pages = FewPages(8 * PAGE, 8 * PAGE)
    arena = Arena(pages, PAGE)
    arena.unmap_all()
    pages.left = 3 * PAGE
    with pytest.raises(CapacityError):
        arena.map_all()
    assert arena.is_mapped
    arena.unmap_all()
    assert (arena.mapped_bytes, pages.left) == (0, 3 * PAGE)
    with pytest.raises(CapacityError):
        Arena(FewPages(8 * PAGE, 7 * PAGE), PAGE)


def test_more_than_the_host_has_is_an_error_of_ours():
    with pytest.raises(CapacityError, match="host memory"):
        open_arena(1 << 60, 1 << 60, CPU)


# On a GPU, as its driver hears of it.


class FakeDriver:
    """Succeeds on every call except the n-th, and checks that only allocated memory is freed."""

    def __init__(self, refuses_at=-1, code=2):
        self.refuses_at, self.code = refuses_at, code
        self.calls = []
        self.blocks, self.mapped, self.ranges = {}, {}, {}
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemAccessDesc = lambda: SimpleNamespace(location=SimpleNamespace())
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemAllocationGranularity_flags = SimpleNamespace(
            CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1
        )

    def refuses(self, name):
        self.calls.append(name)
        return len(self.calls) - 1 == self.refuses_at

    def cuMemGetAllocationGranularity(self, properties, kind):
        assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 3)
        return (self.code, 0) if self.refuses("granularity") else (0, 2 * MIB)

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if self.refuses("reserve"):
            return self.code, 0
        self.ranges[0x7000_0000_0000] = size
        return 0, 0x7000_0000_0000

    def cuMemAddressFree(self, address, size):
        assert not self.mapped
        assert self.ranges.pop(address) == size
        return (0,)

    def cuMemCreate(self, size, properties, flags):
        if self.refuses("create"):
            return self.code, 0
        handle = len(self.calls)
        self.blocks[handle] = size
        return 0, handle

    def cuMemRelease(self, handle):
        del self.blocks[handle]
        return (0,)

    def cuMemMap(self, address, size, offset, handle, flags):
        if self.refuses("map"):
            return (self.code,)
        assert self.blocks[handle] == size
        assert address not in self.mapped
        self.mapped[address] = size
        return (0,)

    def cuMemSetAccess(self, address, size, descriptors, count):
        if self.refuses("access"):
            return (self.code,)
        assert self.mapped[address] == size
        assert [(d.location.id, d.flags) for d in descriptors] == [(3, 3)]
        return (0,)

    def cuMemUnmap(self, address, size):
        while size:
            mapped = self.mapped.pop(address)
            address, size = address + mapped, size - mapped
        assert size == 0
        return (0,)


def gpu_life(driver):
    pages = CudaPages(5 * MIB, torch.device("cuda:3"), driver)
    try:
        assert pages.size_bytes == 6 * MIB
        for _ in range(2):
            pages.map(0, 4 * MIB)
            pages.map(4 * MIB, 2 * MIB)
            pages.unmap(0, 4 * MIB)
            pages.unmap(4 * MIB, 2 * MIB)
        pages.map(0, 4 * MIB)
        pages.map(4 * MIB, 2 * MIB)
        pages.unmap(0, 6 * MIB)
        pages.map(0, 4 * MIB)
    finally:
        pages.close()
        pages.close()
        assert not driver.mapped
        assert not driver.blocks


def test_what_the_driver_gave_is_given_back():
    driver = FakeDriver()
    gpu_life(driver)
    assert not driver.ranges
    assert driver.calls.count("create") == driver.calls.count("access") == 7


@pytest.mark.parametrize(
    ("code", "error"), [(2, CapacityError), (801, ConfigError), (999, DeviceError)]
)
@pytest.mark.parametrize("refused", range(23))
def test_a_refusal_of_the_driver_leaves_nothing_behind(refused, code, error):
    driver = FakeDriver(refused, code)
    with pytest.raises(error):
        gpu_life(driver)
    assert not driver.mapped
    assert not driver.blocks
    assert not driver.ranges


def test_without_bindings_there_is_an_error_that_names_the_setting():
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError) as caught:
            CudaPages(1, torch.device("cuda:0"))
        assert caught.value.field == "enable_sleep_mode"


# Host memory for what sleeps.


def test_backup_is_taken_ahead_and_used_again():
    backup = HostBackup([3 * PAGE, PAGE], CPU)
    assert backup.held_bytes == 0
    backup.prepare_ahead()
    buffers = backup.buffers()
    assert [len(buffer.view) for buffer in buffers] == [3 * PAGE, PAGE]
    assert backup.held_bytes == 4 * PAGE
    backup.prepare_ahead()
    assert [buffer.bytes.data_ptr() for buffer in backup.buffers()] == [
        buffer.bytes.data_ptr() for buffer in buffers
    ]
    backup.close()
    assert backup.held_bytes == 0


def test_a_host_without_room_is_named_and_nothing_is_held():
    rooms = iter([RESERVE_BYTES + PAGE, RESERVE_BYTES + PAGE - 1])
    backup = HostBackup([PAGE, PAGE], CPU, lambda: next(rooms))
    with pytest.raises(CapacityError, match="level 2"):
        backup.buffers()
    assert backup.held_bytes == 0


def test_failing_ahead_costs_nothing_and_is_tried_again():
    room = [0]
    asked = threading.Event()

    def host_room():
        asked.set()
        return room[0]

    backup = HostBackup([PAGE], CPU, host_room)
    backup.prepare_ahead()
    assert asked.wait(PATIENCE_S)
    room[0] = RESERVE_BYTES + PAGE
    assert len(backup.buffers()) == 1


def test_closing_ends_a_preparation_that_is_under_way():
    asked, go_on, calls = threading.Event(), threading.Event(), []

    def host_room():
        calls.append(1)
        asked.set()
        go_on.wait(PATIENCE_S)
        return 1 << 60

    backup = HostBackup([PAGE] * 5000, CPU, host_room)
    backup.prepare_ahead()
    assert asked.wait(PATIENCE_S)
    closing = threading.Thread(target=backup.close)
    closing.start()
    assert backup._stopping.wait(PATIENCE_S)
    go_on.set()
    closing.join(PATIENCE_S)
    assert backup.held_bytes == 0
    assert len(calls) < 5000


def test_room_of_the_host_is_no_more_than_the_machine_has():
    assert 0 < host_room_bytes() < PAGE * os.sysconf("SC_PHYS_PAGES")
