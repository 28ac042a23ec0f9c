"""Finds the directory of a repository that a driver names, in a hub cache below the roots, and
downloads it if the daemon may."""

import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from model_hub.cache import find_missing, repository_folder, snapshot, stored_content
from model_hub.faults import HubError, HubFault
from model_hub.fetching import DownloadProgress, fetch
from model_hub.names import RepoName, read_commit
from model_hub.needed_files import NeededPart
from rpc_schema.errors import CapacityError, CheckpointError, WorkerError
from worker_daemon.contracts.hub import HubSettings
from worker_daemon.errors import config_error
from worker_daemon.phases import LONG_OPERATION_S, SetPhase
from worker_daemon.worker.resolve import confine_directory

_LOG_EVERY_S: Final = 10.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubModels:
    """Repositories of one kind, below the roots of that kind."""

    settings: HubSettings
    roots: Sequence[Path]
    field: str = "model"
    option: str = "--model-root"
    """Purpose of the roots, and the daemon's option that has them, for errors."""

    def locate(
        self,
        text: str,
        part: NeededPart,
        set_phase: SetPhase | None = None,
        content: bytes | None = None,
    ) -> str:
        """Return the directory of a repository, if `text` names one with its commit and there is no
        directory of that name; else `text`. Downloads what is missing if it may: on the caller's
        thread, in another process.

        content: see LoadModel. set_phase: gets the progress.

        Raises:
            ConfigError: a file leads out of the roots.
            CheckpointError: it is not there, or cannot be downloaded, or is not what the driver
                means.
            CapacityError: there is no room for it.
        """
        name = read_commit(text)
        if name is None or any((root / text).is_dir() for root in self.roots):
            return text
        found, problem = self._find(name, part)
        if found is None:
            self._check_may_fetch(name, problem)
            found = self._fetch(name, part, set_phase)
        self._check_content(name, found, part, content)
        return str(found)

    def find(self, text: str, part: NeededPart) -> str:
        """Do the same, without a download and without a look at the contents."""
        name = read_commit(text)
        if name is None or any((root / text).is_dir() for root in self.roots):
            return text
        found, problem = self._find(name, part)
        if found is None:
            raise self._missing(name, problem)
        return str(found)

    def _find(self, name: RepoName, part: NeededPart) -> tuple[Path | None, str]:
        """Return the snapshot that has all files, or what is missing."""
        assert name.revision is not None
        problem = "its hub cache does not have it"
        for cache in self._caches():
            directory = snapshot(cache / repository_folder(name.repo_id), name.revision)
            if directory.is_dir():
                directory = confine_directory(str(directory), self.roots, self.field, self.option)
                missing = find_missing(directory, part)
                if missing is None:
                    return directory, ""
                problem = f"its hub cache does not have all of it: {missing}"
        return None, problem

    def _caches(self) -> Iterator[Path]:
        """Yield the directories that may be a hub cache."""
        yield from self.roots
        if self._own_cache is not None:
            yield self._own_cache

    @property
    def _own_cache(self) -> Path | None:
        """The user's hub cache, if it is below a root."""
        cache = self.settings.cache
        if cache is None:
            return None
        inside = any(cache.resolve().is_relative_to(root.resolve()) for root in self.roots)
        return cache if inside else None

    def _check_may_fetch(self, name: RepoName, problem: str) -> None:
        if not self.settings.allow_download:
            raise self._missing(name, problem)
        if self._own_cache is None:
            cache = self.settings.cache
            problem = (
                f"it cannot be downloaded: the hub cache, {cache}, is below no {self.field} root"
            )
            fix = f"start the daemon with {self.option} {cache}, or set HF_HUB_CACHE below a root"
            raise config_error(self.field, str(name), problem, fix)

    def _missing(self, name: RepoName, problem: str) -> CheckpointError:
        cache = self._own_cache or (self.roots[0] if self.roots else Path())
        words = ["hf", "download", name.repo_id, "--revision", name.revision or ""]
        words += ["--cache-dir", str(cache), "--include", "*.json", "--include", "*.safetensors"]
        fix = f"on the daemon's host, as its user: {shlex.join(words)}"
        fix = f"{fix}; or start the daemon with --allow-download"
        return CheckpointError(
            f"the daemon lacks this {self.field}: {problem}",
            field=self.field,
            value=str(name),
            fix=fix,
        )

    def _fetch(self, name: RepoName, part: NeededPart, set_phase: SetPhase | None) -> Path:
        cache = self._own_cache
        assert cache is not None, "_check_may_fetch has passed"
        _LOG.info("downloading %s into %s", name, cache)
        began = time.monotonic()
        try:
            show = _Shown(name, set_phase)
            fetched = fetch(name, cache, part, self.settings.environment, show)
        except _Awaited:
            problem, fix = "another driver attached during the download", "load it again"
            raise CheckpointError(problem, field=self.field, value=str(name), fix=fix) from None
        except HubError as error:
            raise self._failed(error) from None
        _LOG.info("downloaded %s in %.1f s", name, time.monotonic() - began)
        return confine_directory(str(fetched.directory), self.roots, self.field, self.option)

    def _failed(self, error: HubError) -> WorkerError:
        kind = CapacityError if error.fault is HubFault.NO_ROOM else CheckpointError
        return kind(
            f"the daemon cannot download it: {error.problem}",
            field=self.field,
            value=error.name,
            fix=f"on the daemon's host: {error.fix}",
        )

    def _check_content(
        self, name: RepoName, directory: Path, part: NeededPart, content: bytes | None
    ) -> None:
        if content is None or part is not NeededPart.MODEL:
            return
        stored = stored_content(directory)
        if stored is not None and stored != content:
            raise CheckpointError(
                "the files in this daemon's hub cache are not those that the driver's hub has at "
                "this commit",
                field=self.field,
                value=str(name),
                fix=f"remove {directory}, and download it again",
            )


class _Awaited(Exception):
    """Another driver waits for the end of the download, which may be hours away."""


class _Shown:
    """Shows a download in the phase and in the log. Raises _Awaited."""

    def __init__(self, name: RepoName, set_phase: SetPhase | None) -> None:
        self._name = name
        self._set_phase = set_phase
        self._began = self._logged = time.monotonic()

    def __call__(self, progress: DownloadProgress) -> None:
        now = time.monotonic()
        done, total = progress.done_bytes, max(1, progress.total_bytes)
        rate = done / max(1e-3, now - self._began)
        if self._set_phase is not None:
            phase = f"DOWNLOADING {100 * done // total}%, {rate / 1e6:.1f} MB/s"
            if self._set_phase(phase, LONG_OPERATION_S, done=done / total):
                raise _Awaited
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            _LOG.info("downloading %s: %.2f of %.2f GB", self._name, done / 1e9, total / 1e9)
