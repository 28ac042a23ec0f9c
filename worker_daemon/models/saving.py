"""Writes this rank's part of a saved set, in the layout of `saved_set.py`, and puts the set in
place.

The ranks of a group write in parallel into one new directory next to the save in use. Once all have
written, rank 0 renames its index over the set's: readers see the old set or the new one. Until then
every rank holds a lock on the directory, which ends with its process. A directory without a lock is
left over from an interrupted save, and the next save removes it.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from rpc_schema.errors import CapacityError, CheckpointError, ConfigError
from worker_daemon.errors import config_error
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.saved_set import (
    INDEX_FILE,
    SAFETENSORS,
    FileKind,
    GroupShape,
    SavedTensor,
    index_bytes,
    is_save_id,
    rank_index_bytes,
    rank_index_name,
    read_saved_set,
)
from worker_daemon.models.tensor_bytes import num_bytes
from worker_daemon.raising import Translation

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The name and layout of a save."""

    save: str
    """32 hex digits, the same on all ranks."""
    name: str
    pattern: str
    """Pattern of the file names, with {rank} and {part}."""
    max_size_bytes: int
    """Maximum bytes of tensors per file; a larger tensor has a separate file."""
    files: FileKind = SAFETENSORS


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weights that one rank saves."""

    rank: int
    shape: GroupShape
    decoder: DecoderConfig
    config_files: Mapping[str, bytes]
    """Files that rank 0 writes."""
    tensors: Mapping[str, Tensor]
    """Checkpoint name -> this rank's part; any strides, any device."""
    version: int
    """Number of the weights' version."""


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Files that a rank has written."""

    num_files: int
    size_bytes: int
    seconds: float


class Saver:
    """A rank's saves, one at a time: write(), then finish(). Belongs to the step thread."""

    def __init__(self, root: Path | None) -> None:
        """root: an existing directory that only this user may write; None refuses every save."""
        self._root = root
        self._pending: _PendingSave | None = None

    def write(
        self, request: SaveRequest, weights: RankWeights, before_file: Callable[[], object]
    ) -> SaveReport:
        """Write this rank's files next to the set in use; every byte is on disk on return.

        An earlier save that is not in use is deleted first. before_file is called before each
        file.

        Raises:
            ConfigError: there is no root, the name or pattern is not allowed, or the root cannot be
                written.
            CapacityError: the disk is full. After either error, none of this rank's files are left.
        """
        home = self._home(request.name)
        _check_pattern(request.pattern, request.files.suffix)
        self._discard()
        with _writing(home):
            pending = self._pending = _PendingSave(home, request, weights)
            try:
                if weights.rank == 0:
                    _remove_dead(home, keep=(request.save, _save_in_use(home)))
                return pending.write(request, weights, before_file)
            except BaseException:
                self._discard()
                raise

    def finish(self, save: str, *, keep: bool) -> None:
        """End a save: put it in place (on rank 0, after all ranks have written), or remove it.

        Raises:
            ConfigError: keep is set but this rank has no such open save, or another rank's files
                are not under this root.
            CapacityError: the disk is full; the previous set stays in place.
        """
        pending = self._pending
        if pending is None or pending.save != save:
            if keep:
                raise config_error("save", save, "no such save is open on this rank", "save again")
        elif keep:
            with _writing(pending.home):
                pending.publish()
            pending.release()  # kept open: if rank 0 fails, all ranks are asked to remove it
        else:
            self._discard()

    def _discard(self) -> None:
        if self._pending is not None:
            self._pending.discard()
            self._pending = None

    def _home(self, name: str) -> Path:
        if self._root is None:
            raise ConfigError(
                "this daemon has no directory to save under",
                field="save-root",
                fix="start it with --save-root DIR",
            )
        if not _NAME.fullmatch(name) or name in (".", ".."):
            fix = "use up to 128 letters, digits, '.', '_' and '-'"
            raise config_error("name", name, "a set has a name, not a path", fix)
        return self._root / name


class _PendingSave:
    """Files of this rank that are not in use yet, and the lock that protects them."""

    def __init__(self, home: Path, request: SaveRequest, weights: RankWeights) -> None:
        self.home = home
        self.save = request.save
        self._directory = home / request.save
        self._rank = weights.rank
        self._num_ranks = weights.shape.num_ranks
        self._index = index_bytes(
            request.save, weights.shape, weights.decoder, request.files.name, weights.version
        )
        self._write_tensors = request.files.write
        self._files: list[Path] = []
        self._lock: int | None = _open_locked(self._directory)

    def write(
        self, request: SaveRequest, weights: RankWeights, before_file: Callable[[], object]
    ) -> SaveReport:
        began = time.monotonic()
        saved: dict[str, SavedTensor] = {}
        parts = _parts(weights.tensors, request.max_size_bytes)
        for part, tensors in enumerate(parts):
            before_file()
            saved |= self._write_part(_file_name(request.pattern, self._rank, part), tensors)
        for name, content in weights.config_files.items() if self._rank == 0 else ():
            self._write_file(name, content)
        self._write_file(rank_index_name(self._rank), rank_index_bytes(saved))
        _sync_directory(self._directory)
        size_bytes = sum(map(num_bytes, weights.tensors.values()))
        return SaveReport(len(parts), size_bytes, time.monotonic() - began)

    def publish(self) -> None:
        """Make this save the set's current one (rank 0 only)."""
        if self._rank != 0:
            return
        self._check_complete()
        draft = self._directory / INDEX_FILE
        draft.unlink(missing_ok=True)  # left by a failed attempt
        self._write_file(INDEX_FILE, self._index)
        draft.rename(self.home / INDEX_FILE)
        _sync_directory(self.home)
        _sync_directory(self.home.parent)
        _remove_dead(self.home, keep=(self.save,))

    def discard(self) -> None:
        """Remove this rank's files and, on rank 0, those that other ranks left; never the set in
        use."""
        if _save_in_use(self.home) != self.save:
            for file in self._files:
                with contextlib.suppress(OSError):
                    file.unlink()
            if self._rank == 0 and self._has_all():
                shutil.rmtree(self._directory, ignore_errors=True)
            for directory in (self._directory, self.home):
                with contextlib.suppress(OSError):
                    directory.rmdir()
        self.release()

    def release(self) -> None:
        """Release the directory. Once all ranks have, another save may remove it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _write_part(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, SavedTensor]:
        with self._create(name) as file:
            checksums = self._write_tensors(file, tensors)
        return {
            tensor: SavedTensor(name, tuple(tensors[tensor].shape), checksum)
            for tensor, checksum in checksums.items()
        }

    def _write_file(self, name: str, content: bytes) -> None:
        with self._create(name) as file:
            file.write(content)

    @contextlib.contextmanager
    def _create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file, which is on disk when the block ends."""
        path = self._directory / name
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            self._files.append(path)
            yield file
            file.flush()
            os.fsync(file.fileno())

    def _has_all(self) -> bool:
        return all((self._directory / name).is_file() for name in self._others())

    def _others(self) -> list[str]:
        return [rank_index_name(rank) for rank in range(1, self._num_ranks)]

    def _check_complete(self) -> None:
        for name in self._others():
            if not (self._directory / name).is_file():
                raise config_error(
                    "save-root",
                    str(self.home.parent),
                    f"{self._directory} has no {name}: that rank wrote elsewhere, or not at all",
                    "give the same --save-root to all daemons of the group",
                )


def _check_pattern(pattern: str, suffix: str) -> None:
    name = _file_name(pattern, 0, 0)
    complete = "{rank}" in pattern and "{part}" in pattern and pattern.endswith(suffix)
    if not complete or not _NAME.fullmatch(name):
        problem = "the pattern gives no plain file name for each rank and part"
        fix = f"model-rank-{{rank}}-part-{{part}}{suffix}"
        raise config_error("pattern", pattern, problem, fix)


def _file_name(pattern: str, rank: int, part: int) -> str:
    return pattern.replace("{rank}", str(rank)).replace("{part}", str(part))


def _parts(tensors: Mapping[str, Tensor], max_size_bytes: int) -> list[dict[str, Tensor]]:
    """Divide the tensors, in order, into as few files as the size allows."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + num_bytes(tensor) > max_size_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += num_bytes(tensor)
    return parts


def _open_locked(directory: Path) -> int:
    """Make the directory, and return a descriptor that holds a shared lock on it, never on one that
    was removed in the meantime."""
    while True:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another rank gave up and removed it
            _refuse_link(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)
            fd = _open_directory(directory)
            fcntl.flock(fd, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), directory.stat()):
                    return fd
            os.close(fd)


def _refuse_link(home: Path) -> None:
    if not stat.S_ISDIR(home.lstat().st_mode):
        fix = "remove it, or use another name"
        raise config_error("name", home.name, f"{home} is a link; links are not followed", fix)


def _save_in_use(home: Path) -> str:
    """Return the save that the set's index names; empty if there is none."""
    try:
        return read_saved_set(home).directory.name
    except CheckpointError:
        return ""


def _remove_dead(home: Path, keep: Collection[str]) -> None:
    """Remove all saves that no rank has locked, except those to keep."""
    for directory in home.iterdir():
        if is_save_id(directory.name) and directory.name not in keep:
            with contextlib.suppress(OSError):  # BlockingIOError: a live rank holds the lock
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    fd = _open_directory(directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(fd)


def _sync_directory(directory: Path) -> None:
    fd = _open_directory(directory)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_directory(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _writing(home: Path) -> Translation:
    def translate(error: Exception) -> ConfigError | CapacityError:
        assert isinstance(error, OSError)
        kind: type[ConfigError | CapacityError] = ConfigError
        fix = "give a --save-root that this user may write"
        if error.errno in _DISK_FULL:
            kind, fix = CapacityError, "free space on that file system, or save elsewhere"
        return kind(
            f"{home} cannot be written: {error.strerror}",
            field="save-root",
            value=str(home.parent),
            fix=fix,
        )

    return Translation((OSError,), translate)
