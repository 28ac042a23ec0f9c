"""Memory that outlives its daemon: what is kept, for whom, and what is refused by name."""

import os

import pytest

from rpc_schema.errors import CapacityError, ConfigError
from tests.support.tmpfs import tmpfs_directory
from worker_daemon.device import kept_memory
from worker_daemon.device.kept_memory import KeptMemory

HEAD, SIZE = 4096, 4 * 4096


@pytest.fixture
def place():
    """A directory on a tmpfs that does not exist yet."""
    with tmpfs_directory() as parent:
        yield parent / "kept"


@pytest.fixture
def opened(place):
    """Opens the memory, and closes it in the end."""
    made = []

    def open_one():
        made.append(KeptMemory(place))
        return made[-1]

    yield open_one
    for each in made:
        each.close()


def test_the_next_one_finds_what_was_left(opened, place):
    first = opened()
    mapping = first.open(HEAD, SIZE)
    mapping.wait_until_there()
    assert mapping.is_there
    assert first.held_bytes == SIZE
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "blocks").stat().st_mode & 0o777 == 0o600
    mapping.memory[HEAD : HEAD + 4] = b"left"
    mapping.close()
    first.close()
    second = opened()
    longer = second.open(HEAD, SIZE + 4096)
    longer.wait_until_there()
    assert longer.memory[HEAD : HEAD + 4] == b"left"
    assert second.held_bytes == SIZE + 4096
    longer.close()
    shorter = second.open(HEAD, SIZE)
    assert not any(shorter.memory[:])
    assert longer.memory[HEAD : HEAD + 4] == b"left", "a mapping was shortened"
    shorter.close()
    second.remove()
    assert second.held_bytes == 0


def test_a_hole_is_filled_again_and_reads_as_zeros_before(opened, place):
    memory = opened()
    mapping = memory.open(HEAD, SIZE)
    mapping.wait_until_there()
    mapping.memory[SIZE - 4 :] = b"left"
    mapping.close()
    os.truncate(place / "blocks", SIZE - 4096)
    again = memory.open(HEAD, SIZE)
    found = bytearray(8)
    again.read(SIZE - 4, memoryview(found))
    assert found == bytes(8)
    again.wait_until_there()
    assert memory.held_bytes == SIZE
    again.close()


def test_one_daemon_at_a_time(opened):
    opened()
    with pytest.raises(ConfigError, match=r"kv-host-dir = .*give each daemon its own"):
        opened()


def test_only_a_tmpfs(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    device = tmp_path.stat().st_dev
    mounts.write_text(
        f"22 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - ext4 /dev/vda rw\n"
    )
    monkeypatch.setattr(kept_memory, "_MOUNTS", mounts)
    with pytest.raises(ConfigError, match=r"is on ext4, not on a tmpfs; field kv-host-dir"):
        KeptMemory(tmp_path / "kept")
    mounts.write_text("")
    with pytest.raises(ConfigError, match="is on an unknown file system"):
        KeptMemory(tmp_path / "kept")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda own: own.chmod(0o750), "has mode 0750"),
        (lambda own: (own / "blocks").chmod(0o640), "has mode 0640: others may have it open"),
        (lambda own: (own.parent / "other").hardlink_to(own / "blocks"), "has other names"),
        (lambda own: replace(own, lambda path: path.mkdir()), "is not a regular file"),
        (lambda own: replace(own, lambda p: p.symlink_to(own / "lock")), "is not a regular file"),
    ],
    ids=["directory", "file", "hard link", "no file", "symbolic link"],
)
def test_what_others_could_reach_is_refused(opened, place, spoil, said):
    first = opened()
    first.open(HEAD, SIZE).close()
    first.close()
    spoil(place)
    with pytest.raises(ConfigError, match=f"{said}.*field kv-host-dir"):
        opened()


def replace(own, make):
    path = own / "blocks"
    path.unlink()
    make(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "blocks"])
def test_what_belongs_to_others_is_refused(opened, place, name):
    first = opened()
    first.open(HEAD, SIZE).close()
    first.close()
    os.chown(place / name, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to user 12345.*field kv-host-dir"):
        opened()


def test_too_little_room(opened, monkeypatch):
    memory = opened()
    with pytest.raises(CapacityError, match=r"to give; field kv-host-dir"):
        memory.check_room(1 << 60)
    with pytest.raises(CapacityError, match="larger tmpfs"):
        memory.open(HEAD, 1 << 60)
    real, failing = os.posix_fallocate, []

    def fallocate(fd, offset, size):
        if size > HEAD:
            failing.append(size)
            raise OSError(28, os.strerror(28))
        return real(fd, offset, size)

    monkeypatch.setattr(kept_memory.os, "posix_fallocate", fallocate)
    mapping = memory.open(HEAD, SIZE)
    with pytest.raises(CapacityError, match="No space left"):
        mapping.wait_until_there()
    assert failing and not mapping.is_there
    mapping.close()
