"""Keeps what libraries' attention took at earlier starts, in files beside the compiled kernels."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from worker_daemon.directories import open_own_file, replace_own_file
from worker_daemon.kernel_compiler import hash_sources
from worker_daemon.layers.prompt_providers import PromptCase, ScoreKind

MIN_GAIN = 1.03
"""A library must be this much faster than our kernel: less is within the noise of a short
measurement, and costs an import at every start."""

_MAX_BYTES = 1 << 16

_LOG = logging.getLogger(__name__)


class Timed(NamedTuple):
    """Seconds of one chunk."""

    theirs: float
    ours: float

    @property
    def is_won(self) -> bool:
        """True if the library is faster by MIN_GAIN."""
        return self.theirs * MIN_GAIN <= self.ours


class ProviderRecords:
    """The measurements of all cases on this host. A file that is missing, unreadable or malformed
    counts as none: the measurement is made again."""

    def __init__(self, directory: Path | None) -> None:
        """directory: a claimed one (directories.py), which may not exist; None keeps nothing."""
        self._directory = directory

    def find(self, label: str, case: PromptCase) -> dict[ScoreKind, Timed] | None:
        """Return the times of each of the case's kinds, as kept. label: library and version."""
        path = self._path(label, case)
        if path is None:
            return None
        try:
            with os.fdopen(open_own_file(path, os.O_RDONLY), "rb") as file:
                pairs = json.loads(file.read(_MAX_BYTES))
            timed = [Timed(*map(_seconds, pair)) for pair in pairs]
            return dict(zip(case.kinds, timed, strict=True))
        except FileNotFoundError:
            return None
        except (OSError, TypeError, ValueError, RecursionError) as error:
            _LOG.warning("%s is not read, attention is measured again: %s", path, error)
            return None

    def keep(self, label: str, case: PromptCase, timed: Mapping[ScoreKind, Timed]) -> None:
        """Keep the times of all of the case's kinds. If they cannot be written, which is logged,
        the next start measures again."""
        path = self._path(label, case)
        if path is None:
            return
        content = json.dumps([timed[kind] for kind in case.kinds]).encode()
        try:
            replace_own_file(path, content)
        except OSError as error:  # also another rank of this host, which writes the same
            _LOG.info("%s is not written: %s", path, error)

    def _path(self, label: str, case: PromptCase) -> Path | None:
        """Return the file of everything that the times depend on."""
        if self._directory is None:
            return None
        is_gpu = case.device.type == "cuda"
        device = torch.cuda.get_device_name(case.device) if is_gpu else case.device.type
        parts = (
            device,
            torch.__version__,
            hash_sources(),
            label,
            case.dtype,
            case.heads,
            case.kinds,
        )
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()
        return self._directory / f"{digest}.attention.json"


def _seconds(value: object) -> float:
    if isinstance(value, float) and 0 < value < math.inf:
        return value
    raise ValueError(f"{value!r} is no time in seconds")
