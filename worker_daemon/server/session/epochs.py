"""The last granted epoch of an endpoint, on disk, so that a restarted daemon grants none twice."""

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Final

from rpc_schema.errors import ConfigError
from rpc_schema.lifecycle import MAX_EPOCH_STEP
from worker_daemon.directories import claim_directory, open_own_file, replace_own_file, unusable
from worker_daemon.errors import config_error
from worker_daemon.server.wire.endpoints import AnyEndpoint

MAX_EPOCH: Final = 1 << 62
"""The largest epoch that is granted. A larger number means that the file is damaged, or that an
older release accepted any epoch. Steps of MAX_EPOCH_STEP never reach it."""
MAX_COUNTED: Final = 1 << 32
"""Counting does not reach this number: one epoch per second takes 136 years. A smaller number is
never reset."""
_MAX_BYTES: Final = 32
"""Limit on the file's size; no epoch has as many digits."""

logger = logging.getLogger(__name__)


class EpochFile:
    """One number in one file. Used by the control thread."""

    def __init__(self, state_dir: Path, endpoint: AnyEndpoint, *, reset: bool = False) -> None:
        """Read the file in `state_dir` (claimed: see claim_directory) that belongs to `endpoint`.
        reset: replace a number that is unusable or too large to be a count.

        Raises:
            ConfigError: the directory or the file cannot be used, or others can change them.
            StartLaterError: there is no room for the directory now.
        """
        digest = hashlib.blake2b(os.fsencode(endpoint.path), digest_size=8).hexdigest()
        self.path = state_dir / f"{endpoint.path.name}-{digest}.epoch"
        claim_directory(state_dir, "epochs", "state-dir")
        try:
            self.last = self._reset() if reset else self._read()
        except OSError as error:
            message = f"the epoch file cannot be read: {error}"
            fix = f"remove {self.path} if no driver is alive"
            raise unusable(error, message, "state-dir", self.path, fix) from error

    def record(self, epoch: int) -> None:
        """Record `epoch` as the last one; it is on disk when this returns.

        Raises:
            ConfigError: the epoch is too far above the last one, or the file cannot be written; the
                last epoch is unchanged.
        """
        highest = min(self.last + MAX_EPOCH_STEP, MAX_EPOCH)
        if epoch > highest:
            problem = f"the last epoch is {self.last}, and this one is too far above it"
            fix = f"ask for one of {self.last + 1} to {highest}"
            raise config_error("epoch", epoch, problem, fix)
        try:
            replace_own_file(self.path, f"{epoch}\n".encode("ascii"))
        except OSError as error:
            problem = f"epoch {epoch} cannot be recorded: {error}"
            fix = "make room on that disk, or make it writable"
            raise config_error("state-dir", str(self.path.parent), problem, fix) from error
        self.last = epoch

    def remove(self) -> None:
        """Remove the file: for a daemon whose endpoint ends with it."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> int:
        try:
            fd = open_own_file(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return 0
        try:
            text = os.read(fd, _MAX_BYTES).decode("ascii", errors="replace")
        finally:
            os.close(fd)
        digits = text.strip()
        if not digits.isdecimal() or len(digits) > len(str(MAX_EPOCH)) or int(digits) > MAX_EPOCH:
            problem = f"the epoch file does not hold a number from 0 to {MAX_EPOCH}"
            fix = "write the last granted epoch into it, or start once with --reset-epoch"
            raise config_error("state-dir", str(self.path), problem, fix)
        return int(digits)

    def _reset(self) -> int:
        """Return the last epoch, after replacing an unusable one.

        The new one is the time in minutes. Daemons that count from 1 do not reach it, and two
        resets give two numbers, so no epoch that an old driver may hold is granted again.
        """
        try:
            last = self._read()
        except ConfigError as error:
            logger.warning("%s", error)
        else:
            if last <= MAX_COUNTED:
                logger.warning("epoch %d is usable: --reset-epoch does not change it", last)
                return last
            logger.warning("epoch %d is too large to be a count", last)
        minutes = int(time.time() / 60)
        replace_own_file(self.path, f"{minutes}\n".encode("ascii"))
        logger.warning("the last epoch is %d from now on", minutes)
        return minutes
