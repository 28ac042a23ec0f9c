"""Identity of files: equal for equal contents anywhere, different for any change within a
directory, and for changes that are not tiny anywhere."""

import os
import random
import shutil

import pytest

from rpc_schema.identity import ContentIdentity, first_difference
from worker_daemon.models.file_identity import SAMPLED_BYTES, file_identity, file_stamps

BLOCK = 4096


def identity(directory):
    files = sorted(directory.glob("*.safetensors"))
    texts = {path: path.read_bytes() for path in directory.glob("*.json")}
    return file_identity(directory, texts, files, file_stamps([*texts, *files]))


@pytest.fixture
def directory(tmp_path):
    """Files of 3 * SAMPLED_BYTES together."""
    source = random.Random(os.urandom(8))
    made = tmp_path / "first"
    made.mkdir()
    (made / "config.json").write_text('{"a": 1}')
    (made / "empty.safetensors").touch()
    (made / "large.safetensors").write_bytes(source.randbytes(3 * SAMPLED_BYTES - 70_001))
    (made / "small.safetensors").write_bytes(source.randbytes(70_001))
    return made


def overwrite(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_copy_has_the_same_contents_in_another_place(directory):
    first = identity(directory)
    assert identity(directory) == first
    copy = directory.parent / "second"
    shutil.copytree(directory, copy)
    os.utime(copy / "large.safetensors", (1, 1))
    second = identity(copy)
    assert second.content == first.content
    assert second.place != first.place and second.stamps != first.stamps
    renamed = directory.rename(directory.parent / "third")
    assert identity(renamed) == first, "it is still the same directory"


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_change_of_three_blocks_shows_anywhere(directory, name):
    """Of the samples, every third block is one."""
    before = identity(directory)
    path = directory / f"{name}.safetensors"
    size = path.stat().st_size
    for _ in range(10):
        offset = random.Random(os.urandom(8)).randrange(size - 4 * BLOCK)
        kept = path.read_bytes()[offset : offset + 4 * BLOCK]
        overwrite(path, offset, bytes(each ^ 0x55 for each in kept))
        assert identity(directory).content != before.content, offset
        overwrite(path, offset, kept)
        assert identity(directory).content == before.content


def test_what_else_a_directory_has_counts(directory):
    before = identity(directory)
    config = directory / "config.json"
    config.write_text('{"a": 2}')
    assert identity(directory).content != before.content
    config.write_text('{"a": 1}')
    assert identity(directory).content == before.content
    (directory / "small.safetensors").rename(directory / "other.safetensors")
    assert identity(directory).content != before.content, "the name"
    (directory / "other.safetensors").rename(directory / "small.safetensors")
    with (directory / "small.safetensors").open("ab") as file:
        file.write(b"\0")
    assert identity(directory).content != before.content, "the size"
    (directory / "small.safetensors").unlink()
    assert identity(directory).content != before.content


def test_one_bit_between_two_samples_shows_by_the_stamps(directory):
    """The samples miss it, as documented: of equal contents, the times still differ."""
    path, before = directory / "large.safetensors", identity(directory)
    content, seen = path.read_bytes(), []
    for offset in range(BLOCK, 8 * BLOCK, BLOCK):
        overwrite(path, offset, bytes([content[offset] ^ 1]))
        after = identity(directory)
        assert after.place == before.place and after.stamps != before.stamps
        seen.append(after.content == before.content)
        overwrite(path, offset, content[offset : offset + 1])
    assert any(seen)


def ranks(*values):
    return [
        None if v is None else ContentIdentity(content=v[0] * 32, place=v[1], stamps=v[2])
        for v in values
    ]


def test_ranks_that_differ():
    a, b = b"a", b"b"
    here, there = (a, b"here", b"1"), (a, b"there", b"7")
    assert first_difference([]) is None
    assert first_difference(ranks(None, here, there, None, here)) is None
    assert first_difference(ranks(here, there, (b, b"elsewhere", b"1"))) == (0, 2)
    assert first_difference(ranks(there, here, (a, b"here", b"2"))) == (1, 2)
    sent = (a, b"", b"")
    assert first_difference(ranks(sent, sent)) is None
    assert first_difference(ranks(None, sent, (b, b"", b""))) == (1, 2)
