"""The exchange of memory between the ranks of a group, with files in memory in place of a
device's, and ranks that are threads."""

import gc
import mmap
import os
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from tests.support.waiting import PATIENCE_S
from worker_daemon.distributed.peer_memory import PeerMemoryError
from worker_daemon.distributed.symmetric import MappedPeers, open_peers, share

BLOCK_BYTES = 1 << 20
TIMEOUT_S = PATIENCE_S


class FileBlock:
    """A block of memory behind a file descriptor."""

    num_bytes = BLOCK_BYTES

    def __init__(self, descriptor):
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, BLOCK_BYTES)

    @property
    def address(self):
        return id(self.memory)

    def export(self):
        return os.dup(self.descriptor)

    def release(self):
        self.memory.close()
        os.close(self.descriptor)
        self.descriptor = -1


class FileMeeting:
    def __init__(self, refuses=False):
        descriptor = os.memfd_create("block")
        os.truncate(descriptor, BLOCK_BYTES)
        self.own = FileBlock(descriptor)
        self.refuses = refuses
        self.adopted = []

    def adopt(self, descriptor, num_bytes):
        assert num_bytes == BLOCK_BYTES
        if self.refuses:
            raise PeerMemoryError("not reachable")
        self.adopted.append(FileBlock(os.dup(descriptor)))
        return self.adopted[-1]


def open_descriptors():
    """How many this process has, without those of objects that nobody holds any more."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def run(meetings, store=None):
    """What share returns on each rank."""
    store = store or HashStore()
    store.set_timeout(timedelta(seconds=TIMEOUT_S))
    size = len(meetings)
    with ThreadPoolExecutor(size) as threads:
        ranks = [
            threads.submit(share, PrefixStore("w", store), rank, size, meeting, TIMEOUT_S)
            for rank, meeting in enumerate(meetings)
        ]
        return [rank.result() for rank in ranks]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_rank_writes_into_every_other_ones_block(size):
    before = open_descriptors()
    shared = run([FileMeeting() for _ in range(size)])
    for writer, blocks in enumerate(shared):
        assert len(blocks) == size
        for block in blocks:
            block.memory[writer] = writer + 100
    for rank, blocks in enumerate(shared):
        assert list(blocks[rank].memory[:size]) == [writer + 100 for writer in range(size)]
        for block in blocks:
            block.release()
    assert open_descriptors() == before


def test_one_rank_without_memory_leaves_all_without():
    before = open_descriptors()
    assert run([FileMeeting(), None, FileMeeting()]) == [[], [], []]
    assert open_descriptors() == before


def test_one_rank_that_cannot_map_leaves_all_without():
    before = open_descriptors()
    assert run([FileMeeting(), FileMeeting(refuses=True), FileMeeting()]) == [[], [], []]
    assert open_descriptors() == before


class IntrudedStore:
    """A store through which a stranger learns where to send its messages."""

    def __init__(self):
        self.store = HashStore()
        self.store.set_timeout(timedelta(seconds=TIMEOUT_S))

    def set(self, key, value):
        if "names" in key:
            for size in (3, 24):
                with socket.socket(socket.AF_UNIX) as intruder:
                    intruder.connect(bytes.fromhex(value)[:-16])
                    intruder.send(secrets.token_bytes(size))
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)


def test_strangers_messages_are_dropped():
    store = IntrudedStore()
    with ThreadPoolExecutor(2) as threads:
        ranks = [
            threads.submit(share, store, rank, 2, FileMeeting(), TIMEOUT_S) for rank in range(2)
        ]
        shared = [rank.result() for rank in ranks]
    assert [len(blocks) for blocks in shared] == [2, 2]
    for block in {block for blocks in shared for block in blocks}:
        block.release()


def test_a_peer_that_never_comes_is_an_error_and_leaves_nothing_open():
    before = open_descriptors()
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(RuntimeError):
        share(store, 0, 2, FileMeeting(), TIMEOUT_S)
    assert open_descriptors() == before


def test_processors_without_a_device_share_nothing():
    peers = open_peers(HashStore(), 0, 2, torch.device("cpu"), 1.0)
    assert peers.window is None and not isinstance(peers, MappedPeers)
