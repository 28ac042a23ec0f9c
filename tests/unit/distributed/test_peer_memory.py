"""Blocks of shared device memory: everything allocated is released, at whichever call the CUDA
driver fails."""

import ctypes

import pytest

from worker_daemon.distributed.peer_memory import CudaDriver, PeerMemoryError, adopt, allocate

UNDOES = {
    "cuMemRelease": ("cuMemCreate", "cuMemImportFromShareableHandle"),
    "cuMemAddressFree": ("cuMemAddressReserve",),
    "cuMemUnmap": ("cuMemMap",),
}
GRANULARITY = 2 << 20
OUTPUTS = {
    "cuMemGetAllocationGranularity": GRANULARITY,
    "cuMemCreate": 77,
    "cuMemImportFromShareableHandle": 78,
    "cuMemAddressReserve": 0x7000_0000_0000,
    "cuMemExportToShareableHandle": 5,
}


class RecordingDriver:
    """Grants every call but the n-th."""

    def __init__(self, refuses_at=-1):
        self.refuses_at = refuses_at
        self.calls = []

    def call(self, name, *arguments):
        if len(self.calls) == self.refuses_at:
            self.refuses_at = -1
            raise PeerMemoryError(name)
        self.calls.append((name, arguments))
        if name in OUTPUTS:
            arguments[0]._obj.value = OUTPUTS[name]

    def names(self):
        return [name for name, _ in self.calls]

    def check_balance(self):
        names = self.names()
        for undo, done in UNDOES.items():
            assert names.count(undo) == sum(names.count(name) for name in done), (undo, names)


def life(driver):
    """A block of this process and one of a peer, from first to last."""
    blocks = []
    try:
        blocks.append(allocate(driver, GRANULARITY + 1, device=3))
        blocks[0].fill(1)
        blocks.append(adopt(driver, blocks[0].export(), blocks[0].num_bytes, device=3))
    finally:
        for block in blocks:
            block.release()
            block.release()


def test_blocks_are_whole_pages_and_all_is_given_back():
    driver = RecordingDriver()
    life(driver)
    driver.check_balance()
    sizes = {arguments[1] for name, arguments in driver.calls if name == "cuMemCreate"}
    assert sizes == {2 * GRANULARITY}


@pytest.mark.parametrize("refused", range(11))
def test_a_refusal_leaves_nothing_behind(refused):
    driver = RecordingDriver(refused)
    with pytest.raises(PeerMemoryError):
        life(driver)
    driver.check_balance()


def test_without_a_driver_there_is_an_error_of_our_own():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(PeerMemoryError, match="libcuda"):
            CudaDriver()
    else:
        CudaDriver()
