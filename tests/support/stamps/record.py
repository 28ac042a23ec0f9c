"""What happens in a run: one file, to which each driver appends before it goes on."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from worker_client.requests import RequestOutput, VersionRun


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line."""

    what: Literal["accepted", "ended", "version", "adapter", "lost", "tried", "updated"]
    """version: the model's weights are of one; adapter: the adapter's are; lost: KV of any request
    may have been lost since the last entry."""
    req_id: str = ""
    token_ids: list[int] = []
    runs: list[VersionRun] = []
    """RequestOutput.weights_versions."""
    reason: str = ""
    error: str = ""
    num_preemptions: int = 0
    number: int = -1
    """Of an update, or of a version of the weights."""
    model: int = -1
    running: str = ""
    """Of the update that has made a version; empty if it was loaded."""


class Record:
    """One driver's access."""

    def __init__(self, path: Path) -> None:
        self.before = read(path)
        """What earlier drivers have noted."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, entries: Iterable[Entry]) -> None:
        """Append, each entry whole: a killed process leaves no part of a write."""
        for entry in entries:
            data = msgspec.json.encode(entry) + b"\n"
            assert os.write(self._fd, data) == len(data)

    def end(self, outputs: Iterable[RequestOutput]) -> None:
        """Note requests that have ended."""
        self.note(
            Entry(
                *("ended", out.req_id, out.token_ids, list(out.weights_versions)),
                *(out.finish_reason, out.error, out.num_preemptions),
            )
            for out in outputs
        )


def read(path: Path) -> list[Entry]:
    """Return all entries, oldest first."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Entry) for line in lines]
