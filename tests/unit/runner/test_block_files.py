"""Files of blocks: what comes back is what was written under its name, or an error; the least
recently used ones make room; a file system that refuses costs the block alone."""

import errno
import os
import random

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.runner.connectors import block_files
from worker_daemon.runner.connectors.block_files import (
    HEADER_BYTES,
    BadBlockFileError,
    BlockFiles,
    FileName,
)

BLOCK_BYTES = 88
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES


@pytest.fixture
def opened(tmp_path):
    """open_files(most_bytes) -> BlockFiles of one directory; the former ones are closed."""
    before = []

    def open_files(most_bytes=1 << 20):
        for files in before:
            files.close()
        before[:] = [BlockFiles(tmp_path / "kv", most_bytes)]
        before[0].scan()
        return before[0]

    yield open_files
    for files in before:
        files.close()


def name_of(number, identity=1):
    return FileName(bytes([identity]) * 16, number.to_bytes(17, "little"))


def block_of(number):
    return random.Random(number).randbytes(BLOCK_BYTES)


def write(files, number, **fields):
    files.write(name_of(number, **fields), memoryview(block_of(number)), number - 5)


def read(files, number, **fields):
    into = bytearray(BLOCK_BYTES)
    checksum = files.read(name_of(number, **fields), memoryview(into))
    assert (bytes(into), checksum) == (block_of(number), number - 5)


def paths(tmp_path):
    return sorted(each for each in (tmp_path / "kv").rglob("*") if each.name != "lock")


def test_blocks_come_back_to_the_next_daemon(opened):
    files = opened()
    for number in range(9):
        write(files, number)
    files = opened()
    assert (files.num_files, files.size_bytes) == (9, 9 * FILE_BYTES)
    for number in range(9):
        assert name_of(number) in files
        read(files, number)
    assert name_of(3, identity=2) not in files


def test_the_least_recently_used_go_first_after_a_restart_too(opened, tmp_path):
    files = opened()
    for number in range(4):
        write(files, number)
    for age, path in enumerate(each for each in paths(tmp_path) if each.is_file()):
        os.utime(path, (age, age))
    files = opened(4 * FILE_BYTES)
    read(files, 0)
    write(files, 4)
    assert [name_of(number) in files for number in range(5)] == [True, False, True, True, True]
    assert files.size_bytes == 4 * FILE_BYTES
    files = opened(2 * FILE_BYTES)  # the bound is smaller now
    assert [name_of(number) in files for number in range(5)] == [True, False, False, False, True]
    assert sum(each.is_file() for each in paths(tmp_path)) == 2


def test_removed_files_leave_no_directories(opened, tmp_path):
    files = opened()
    write(files, 1)
    files.remove(name_of(1))
    files.remove(name_of(2))
    assert paths(tmp_path) == []
    assert files.size_bytes == 0


def test_what_a_killed_daemon_was_writing_is_removed_and_other_files_stay(opened, tmp_path):
    files = opened()
    write(files, 1)
    (path,) = [each for each in paths(tmp_path) if each.is_file()]
    draft, other = path.with_name(path.name + ".tmp"), path.with_name("readme")
    draft.write_bytes(b"half")
    other.write_bytes(b"text")
    (tmp_path / "kv" / "notes").mkdir()
    files = opened()
    assert files.num_files == 1
    assert not draft.exists()
    assert other.exists()
    read(files, 1)


def test_every_changed_bit_of_a_header_is_found(opened, tmp_path):
    files = opened()
    write(files, 1)
    (path,) = [each for each in paths(tmp_path) if each.is_file()]
    raw = path.read_bytes()
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(BadBlockFileError):
            read(files, 1)
    path.write_bytes(raw)
    read(files, 1)


def test_short_and_exchanged_files_are_bad(opened, tmp_path):
    files = opened()
    write(files, 1)
    write(files, 2, identity=2)
    first, second = [each for each in paths(tmp_path) if each.is_file()]
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(raw)
    for number, identity in ((1, 1), (2, 2)):
        with pytest.raises(BadBlockFileError, match="another block"):
            read(files, number, identity=identity)
    for size in range(FILE_BYTES):
        first.write_bytes(raw[:size])
        with pytest.raises(BadBlockFileError):
            read(files, 1)
    first.unlink()
    with pytest.raises(FileNotFoundError):
        read(files, 1)
    first.symlink_to(second)
    with pytest.raises(OSError, match="symbolic link"):
        read(files, 1)


def test_a_full_disk_costs_the_block_alone(opened, tmp_path, monkeypatch):
    files = opened()
    write(files, 1)
    real_write, room = os.write, [100]

    def short_write(fd, data):
        """Take what there is room for."""
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real_write(fd, bytes(data)[: room[0]])
        room[0] -= count
        return count

    before = paths(tmp_path)
    monkeypatch.setattr(block_files.os, "write", short_write)
    with pytest.raises(OSError, match="No space left"):
        write(files, 2)
    assert name_of(2) not in files
    assert [each for each in paths(tmp_path) if each.is_file()] == [
        each for each in before if each.is_file()
    ]
    assert files.size_bytes == FILE_BYTES
    room[0] = 1 << 20
    write(files, 2)
    read(files, 1)
    read(files, 2)


def test_a_block_larger_than_the_bound_evicts_nothing(opened):
    files = opened(2 * FILE_BYTES)
    write(files, 1)
    with pytest.raises(OSError, match="larger than the bound"):
        files.write(name_of(2), memoryview(bytes(2 * FILE_BYTES)), 0)
    read(files, 1)


def test_a_directory_has_one_daemon(opened, tmp_path):
    opened()
    with pytest.raises(ConfigError, match=r"kv-file-dir = .*give each daemon its own"):
        BlockFiles(tmp_path / "kv", 1 << 20)


def test_a_directory_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(ConfigError, match="kv-file-dir"):
        BlockFiles(tmp_path / "kv", 1 << 20)
