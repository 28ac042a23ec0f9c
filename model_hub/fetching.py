"""Downloads a repository's needed files into the user's hub cache, in a process of its own."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from model_hub.faults import HubError, HubFault
from model_hub.names import RepoName
from model_hub.needed_files import NeededPart

STALL_S: Final = 120.0
"""Time without a byte, or without an answer, after which a download has failed: several of
huggingface_hub's own timeouts and tries."""
LIMIT_S: Final = 24 * 3600.0
"""Time for a download in all."""
INSTALL: Final = 'pip install "worker-daemon[hub]"'
_PROGRAM: Final = "model_hub.download"
_PACKAGE: Final = "huggingface_hub"
_SETTINGS: Final = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_VERBOSITY": "critical",
}
_MAX_LINE_BYTES: Final = 1 << 20


class DownloadProgress(NamedTuple):
    """Bytes of a download so far, and in all."""

    done_bytes: int
    total_bytes: int
    num_files: int


OnProgress = Callable[[DownloadProgress], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files of a repository that are in the cache."""

    name: RepoName
    """With its commit."""
    directory: Path
    """The snapshot: configuration, tokenizer and so on."""
    cache: Path
    content: bytes | None
    """Identity of config.json and weights, downloaded or not (cache.content_of); None: unknown, or
    an adapter."""


def fetch(
    name: RepoName,
    cache: Path,
    part: NeededPart,
    environment: Mapping[str, str],
    on_progress: OnProgress = lambda progress: None,
    *,
    stall_s: float = STALL_S,
    limit_s: float = LIMIT_S,
) -> Fetched:
    """Download what is needed of a repository and is not in the cache; without the hub (offline
    mode, no connection), find it there. Resolves the revision to a commit. What a download that
    failed has completed is kept.

    environment: of the process, which has the user's settings (HF_TOKEN, HF_ENDPOINT, HF_HOME).

    Raises:
        HubError: with the fault.
    """
    if find_spec(_PACKAGE) is None:
        problem = f"there is no such directory, and {_PACKAGE} is not installed"
        raise HubError(HubFault.EXTRA, str(name), problem, INSTALL)
    request = {"repo_id": name.repo_id, "revision": name.revision, "cache": str(cache)}
    deadline = time.monotonic() + limit_s
    moved, last = time.monotonic(), (-1, -1)
    with _process({**request, "part": part}, name, environment) as process:
        lines = _Lines(process)
        while True:
            line = lines.next(min(deadline, moved + stall_s))
            if line is None:
                raise _stalled(name, min(stall_s, limit_s))
            if line["event"] == "fault":
                raise HubError(HubFault(line["fault"]), str(name), line["problem"], line["fix"])
            if line["event"] == "done":
                break
            if (line["received"], line["done"]) != last:
                moved, last = time.monotonic(), (line["received"], line["done"])
            if time.monotonic() >= min(deadline, moved + stall_s):
                raise _stalled(name, min(stall_s, limit_s))
            on_progress(DownloadProgress(line["done"], line["total"], line["files"]))
    content = None if line["content"] is None else bytes.fromhex(line["content"])
    return Fetched(name.at(line["commit"]), Path(line["directory"]), cache, content)


def _stalled(name: RepoName, after_s: float) -> HubError:
    problem = f"the hub sent nothing for {after_s:.0f} s, or the download took too long"
    fix = "try again: complete files are kept"
    return HubError(HubFault.STALLED, str(name), problem, fix)


@contextlib.contextmanager
def _process(
    request: Mapping[str, object], name: RepoName, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run download.py with a request; it is dead when the block ends, and when we end."""
    path = os.pathsep.join(entry for entry in sys.path if Path(entry).is_absolute())
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM],
            env={**environment, **_SETTINGS, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to us, and we end it
        )
    except OSError as error:
        problem = f"no process could be started for the download: {error.strerror}"
        fix = "free memory or processes on this host"
        raise HubError(HubFault.BROKEN, str(name), problem, fix) from error
    with process:
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: the next read shows it
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            yield process
        finally:
            process.kill()


class _Lines:
    """The answers of the process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        self._process = process
        self._fd = process.stdout.fileno()
        self._received = b""
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def next(self, deadline: float) -> dict[str, Any] | None:
        """Return the next answer; None once `deadline`, of time.monotonic(), has passed."""
        while b"\n" not in self._received:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            if not self._poll.poll(left_ms):
                return None
            chunk = os.read(self._fd, _MAX_LINE_BYTES)
            if not chunk:
                code = self._process.wait()
                problem = f"the process of the download ended with {code}"
                return {"event": "fault", "fault": "broken", "problem": problem, "fix": "try again"}
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
