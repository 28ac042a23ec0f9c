"""The last epoch that this endpoint granted, on disk, so that a restarted daemon grants none twice.
Knows no driver."""

import hashlib
import os
from pathlib import Path

from worker_daemon.errors import ConfigError
from worker_daemon.server.endpoints import AnyEndpoint


class EpochFile:
    """One number in one file. Used by the control thread."""

    def __init__(self, state_dir: Path, endpoint: AnyEndpoint) -> None:
        """Read the file in `state_dir` (made if missing, 0700) that belongs to `endpoint`.

        Raises:
            ConfigError: the directory or the file cannot be used.
        """
        digest = hashlib.blake2b(os.fsencode(endpoint.path), digest_size=8).hexdigest()
        self.path = state_dir / f"{endpoint.path.name}-{digest}.epoch"
        try:
            state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.last = self._read()
        except OSError as error:
            raise ConfigError(
                f"the state directory cannot be used: {error}",
                field="state-dir",
                value=str(state_dir),
                fix="choose a directory that this user may write",
            ) from error

    def record(self, epoch: int) -> None:
        """Make `epoch` the last one; it is on disk when this returns.

        Raises:
            ConfigError: it cannot be written; the last epoch stays as it was.
        """
        try:
            self._write(epoch)
        except OSError as error:
            raise ConfigError(
                f"epoch {epoch} cannot be recorded: {error}",
                field="state-dir",
                value=str(self.path.parent),
                fix="make room on that disk, or make it writable",
            ) from error
        self.last = epoch

    def remove(self) -> None:
        """Forget: for a daemon whose endpoint ends with it."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> int:
        try:
            text = self.path.read_text("ascii")
        except FileNotFoundError:
            return 0
        except UnicodeDecodeError:
            text = ""
        if not text.strip().isdecimal():
            raise ConfigError(
                "the epoch file does not hold a number",
                field="state-dir",
                value=str(self.path),
                fix="write the last granted epoch into it, or remove it if no driver is alive",
            )
        return int(text)

    def _write(self, epoch: int) -> None:
        scratch = self.path.with_suffix(".tmp")
        with scratch.open("w", encoding="ascii") as file:
            file.write(f"{epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.path)
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
