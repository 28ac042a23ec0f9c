"""Reads and writes of block files in the background: bounded, counted, and never waited for by a
step."""

import threading
import time

import pytest
import torch

from worker_daemon.runner.connectors import file_traffic
from worker_daemon.runner.connectors.block_files import BlockFiles, FileName, ReadProgress
from worker_daemon.runner.connectors.file_traffic import FileBatch, FileTraffic

WORDS = 22
BLOCK_BYTES = 4 * WORDS


@pytest.fixture
def traffic(tmp_path):
    made = FileTraffic(BlockFiles(tmp_path / "kv", 1 << 20))
    yield made
    made.close()


def names_of(*numbers):
    return [FileName(b"i" * 16, bytes([number]) * 17) for number in numbers]


def batch_of(*numbers, wait=lambda: None):
    rows = torch.arange(len(numbers) * WORDS, dtype=torch.int32).view(-1, WORDS)
    return FileBatch(names_of(*numbers), rows, torch.tensor(numbers), wait)


def write(traffic, *numbers, **fields):
    assert traffic.reserve(BLOCK_BYTES * len(numbers))
    traffic.write(batch_of(*numbers, **fields))


def fetch(traffic, *numbers):
    return traffic.fetch(names_of(*numbers), BLOCK_BYTES, page_locks=False)


def fetched(traffic, *numbers):
    """The progress, once it is done."""
    until = time.monotonic() + 10
    while not (progress := fetch(traffic, *numbers)).is_done:
        assert time.monotonic() < until
        time.sleep(0.001)
    return progress.num_ready


def written(traffic, count):
    until = time.monotonic() + 10
    while traffic.counts.num_written + traffic.counts.num_failed < count:
        assert time.monotonic() < until
        time.sleep(0.001)


def test_a_fetch_ends_at_the_first_block_without_a_file(traffic):
    write(traffic, 0, 1, 3)
    written(traffic, 3)
    assert fetched(traffic, 0, 1, 2, 3) == 2
    assert traffic.take(names_of(3)[0]) is None
    block = traffic.take(names_of(1)[0])
    assert block.checksum == 1
    assert block.row.tolist() == [*range(WORDS, 2 * WORDS)]
    assert traffic.take(names_of(1)[0]) is None  # used up
    assert fetched(traffic, 0, 1, 3) == 3


def test_blocks_are_written_once_their_copies_are_there(traffic):
    are_there = threading.Event()
    write(traffic, 1, wait=are_there.wait)
    (name,) = names_of(1)
    assert not traffic.lacks(name)
    assert name not in traffic.files
    are_there.set()
    written(traffic, 1)
    assert not traffic.lacks(name)
    assert fetched(traffic, 1) == 1


def test_too_many_waiting_blocks_are_not_taken(traffic, monkeypatch):
    monkeypatch.setattr(file_traffic, "MOST_QUEUED_BYTES", 2 * BLOCK_BYTES)
    go_on = threading.Event()
    write(traffic, 1, 2, wait=go_on.wait)
    assert not traffic.reserve(BLOCK_BYTES)
    go_on.set()
    written(traffic, 2)
    write(traffic, 3)
    written(traffic, 3)


def test_fetched_blocks_have_a_bound_and_old_ones_make_room(traffic, monkeypatch):
    monkeypatch.setattr(file_traffic, "MOST_FETCHED_BYTES", 2 * BLOCK_BYTES)
    write(traffic, 0, 1, 2, 3)
    written(traffic, 4)
    assert fetched(traffic, 0, 1, 2) == 2
    assert fetched(traffic, 2, 3) == 0
    monkeypatch.setattr(file_traffic, "STALE_S", 0.0)
    assert fetched(traffic, 2, 3) == 2
    assert fetched(traffic, 2, 3) == 2  # those of the same request stay


def test_bad_files_are_counted_and_removed(traffic):
    write(traffic, 0, 1, 2)
    written(traffic, 3)
    traffic.files._path(names_of(1)[0]).write_bytes(b"short")
    assert fetched(traffic, 0, 1, 2) == 1
    assert traffic.counts.num_bad_files == 1
    assert traffic.lacks(names_of(1)[0])
    write(traffic, 1)
    written(traffic, 4)
    assert fetched(traffic, 0, 1, 2) == 3


def test_refused_writes_are_counted_and_can_be_tried_again(traffic, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(traffic.files, "write", refuse)
    write(traffic, 1, 2)
    written(traffic, 2)
    assert traffic.counts.num_failed == 2
    assert len([each for each in caplog.records if "No space" in each.message]) == 1
    monkeypatch.undo()
    assert traffic.lacks(names_of(1)[0])
    write(traffic, 1)
    written(traffic, 3)
    assert fetched(traffic, 1) == 1


def test_nothing_is_ready_before_the_directory_is_read(tmp_path, monkeypatch):
    go_on = threading.Event()
    files = BlockFiles(tmp_path / "kv", 1 << 20)
    monkeypatch.setattr(files, "scan", go_on.wait)
    traffic = FileTraffic(files)
    try:
        assert fetch(traffic, 1) == ReadProgress(0, is_done=False)
        go_on.set()
        assert fetched(traffic, 1) == 0
    finally:
        traffic.close()
