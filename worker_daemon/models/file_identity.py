"""Identity of the files that weights or an adapter are read from (rpc_schema/identity.py).

Two parts. The contents' digest is the same on every host: small files enter it whole, large ones by
their first and last block and by blocks at equal distances between. A fine-tuned, merged or
quantized model differs in nearly every block. A change of a few bytes between two samples does not
show in it. The files' sizes and modification times, which are compared within one directory, show
that too, unless somebody sets the time back.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.regular_file import RegularFile, TruncatedError

SAMPLED_BYTES: Final = 8 << 20
"""Bytes that are read of the large files together. Of 16 GB that is a block in every 8 MB."""
_BLOCK_BYTES: Final = 4096
_READERS: Final = 16
"""Reads at a time: the delays of a disk or a network add up otherwise."""
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def file_identity(
    directory: Path, texts: Mapping[Path, bytes], files: Sequence[Path], stamps: bytes
) -> SourceIdentity:
    """Return the identity of what is read from a directory.

    texts: small files, with the contents that were read. files: large files, which are sampled.
    stamps: file_stamps of all that is read, from before it was. A file that cannot be read counts
    as empty: reading it for its contents reports the error.
    """
    digest = hashlib.sha256()
    for path in sorted(texts):
        _add(digest, _name_in(directory, path), texts[path])
    for path, samples in zip(files, _sample(files), strict=True):
        _add(digest, _name_in(directory, path), samples)
    return SourceIdentity(content=digest.digest(), place=_place_of(directory), stamps=stamps)


def file_stamps(paths: Iterable[Path]) -> bytes:
    """Return a digest of the names, sizes and modification times of files; those that do not exist
    are left out."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        try:
            facts = path.stat()
        except OSError:
            continue
        _add(digest, path.name.encode(), f"{facts.st_size} {facts.st_mtime_ns}".encode())
    return digest.digest()


def _name_in(directory: Path, path: Path) -> bytes:
    return os.fsencode(os.path.relpath(path, directory))


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    """Add parts so that no other parts give the same bytes."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)


NO_STAMPS: Final = file_stamps([])
"""The stamps of no files."""


def _sample(files: Sequence[Path]) -> list[bytes]:
    """Return the digest of each file's size and samples."""
    sizes = [_size_of(path) for path in files]
    share = min(1.0, SAMPLED_BYTES / max(1, sum(sizes)))
    with ThreadPoolExecutor(_READERS, "file-identity") as readers:
        return list(readers.map(_samples_of, files, (size * share for size in sizes)))


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _samples_of(path: Path, num_bytes: float) -> bytes:
    """Return the digest of a file's size and samples of about num_bytes in all."""
    digest = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK_BYTES))
    try:
        with RegularFile(path) as file:
            _add(digest, str(file.num_bytes).encode())
            for offset in _offsets(file.num_bytes, num_bytes):
                part = block[: file.num_bytes - offset]
                file.read(offset, part)
                digest.update(part)
    except (OSError, TruncatedError):
        return b""
    return digest.digest()


def _offsets(size: int, num_bytes: float) -> list[int]:
    """Return where the samples of a file begin: at its start, at its end, and between."""
    count = max(2, round(num_bytes / _BLOCK_BYTES))
    if count * _BLOCK_BYTES >= size:
        return list(range(0, size, _BLOCK_BYTES))
    last = size - _BLOCK_BYTES
    return [index * last // (count - 1) for index in range(count)]


def _place_of(directory: Path) -> bytes:
    """Return a digest of the host and the directory's own number on it."""
    try:
        boot, facts = _BOOT_ID.read_text(), directory.stat()
    except OSError:
        return b""
    digest = hashlib.sha256()
    _add(digest, boot.encode(), f"{facts.st_dev} {facts.st_ino}".encode())
    return digest.digest()
