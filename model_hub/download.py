"""The process that talks to the hub, through huggingface_hub: `python -m model_hub.download`.

fetching.py runs it, so that a download can be ended at any time, and no other process holds the
package's threads or its tokens. The request is one line of JSON on standard input, whose end ends
this process. Each answer is a line of JSON: progress, then the result or a fault.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TextIO
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from model_hub.cache import (
    DEFAULT_BRANCH,
    StoredFile,
    content_of,
    find_missing,
    known_commit,
    read_index,
    repository_folder,
    snapshot,
    stored_content,
)
from model_hub.faults import HubError, HubFault
from model_hub.names import RepoName
from model_hub.needed_files import (
    CONFIG,
    INDEX,
    BrokenIndex,
    NeededPart,
    adapter_files,
    text_files,
    weight_files,
)

PROGRESS_EVERY_S: Final = 0.25
_AT_A_TIME: Final = 4
"""Files that are downloaded at a time."""
_TRIES: Final = 3
"""Attempts at a file whose connection breaks: huggingface_hub resumes most itself."""
_LISTING_S: Final = 30.0
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_TRANSPORT: Final = ("TransportError", "RequestException")
"""Base classes of the errors of connections, in the HTTP packages of huggingface_hub's versions."""
_ETAG: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""Hash of a small or a large file. Some mirrors list none."""
_URL: Final = re.compile(r"https?://\S+")
_MAX_SHOWN: Final = 200


@dataclass(frozen=True, slots=True)
class Listing:
    """A commit's files, as the hub lists them."""

    commit: str
    files: Mapping[str, StoredFile]


class Received:
    """Counts what comes, by the bars of huggingface_hub (standard error leads nowhere). It tells
    only that something comes: repeated bytes count again, and some count twice."""

    def __init__(self) -> None:
        self.count = 0
        received = self

        class Bar(tqdm):  # type: ignore[misc]  # the package has no types
            def update(self, n: float | None = 1) -> Any:
                received.count += int(n or 0)
                return super().update(n)

        self.bar_type: type[Any] = Bar


class Download:
    """One request. Used by one thread."""

    def __init__(self, name: RepoName, cache: Path, part: NeededPart, lines: TextIO) -> None:
        self._name = name
        self._cache = cache
        self._folder = cache / repository_folder(name.repo_id)
        self._part = part
        self._lines = lines
        self._received = Received()
        self._began = time.time()

    def run(self) -> None:
        """Download what is needed, and write the result. Raises HubError, and what the hub's client
        raises."""
        name = self._name
        try:
            listing = self._list()
        except Exception as error:
            if fault_of(error) not in (HubFault.OFFLINE, HubFault.UNREACHABLE):
                raise
            return self._use_cached(error)
        content = self._get(listing)
        revision = name.revision or DEFAULT_BRANCH
        if not name.is_commit:
            self._note(revision, listing.commit)
        return self._finish(listing.commit, content)

    def _list(self) -> Listing:
        name = self._name
        info = HfApi().model_info(
            name.repo_id, revision=name.revision, files_metadata=True, timeout=_LISTING_S
        )
        files = {}
        for each in info.siblings or ():
            etag = each.lfs.sha256 if each.lfs is not None else each.blob_id or ""
            known = etag if _ETAG.fullmatch(etag) else ""
            files[each.rfilename] = StoredFile(each.rfilename, each.size or 0, known)
        if info.sha is None or not name.at(info.sha).is_commit:
            raise self._error(HubFault.BROKEN, "the hub names no commit", "check HF_ENDPOINT")
        return Listing(info.sha, files)

    def _use_cached(self, cause: Exception) -> None:
        """Take what the cache has: the hub cannot be asked. Raises `cause` if that is not all."""
        commit = known_commit(self._folder, self._name)
        directory = None if commit is None else snapshot(self._folder, commit)
        if commit is None or directory is None or find_missing(directory, self._part) is not None:
            raise cause
        content = None
        with contextlib.suppress(HubError):  # a driver's cache may lack the weights
            content = stored_content(directory)
        self._finish(commit, content)

    def _get(self, listing: Listing) -> bytes | None:
        """Download the needed files; return the content of those that a load reads."""
        names = listing.files.keys()
        if self._part is NeededPart.ADAPTER:
            self._fetch(listing, adapter_files(names))
            return None
        if CONFIG not in names:
            raise BrokenIndex(f"it has no {CONFIG}: it is no model in Hugging Face's format")
        texts = text_files(names)
        if INDEX in names:  # it says how much follows
            self._fetch(listing, [INDEX])
        index = read_index(snapshot(self._folder, listing.commit)) if INDEX in names else None
        weights = weight_files(names, index)
        self._fetch(listing, texts + (weights if self._part is NeededPart.MODEL else []))
        loaded = [CONFIG, *weights, *([INDEX] if index is not None else [])]
        files = [listing.files[name] for name in loaded]
        return content_of(files) if all(each.etag for each in files) else None

    def _fetch(self, listing: Listing, names: list[str]) -> None:
        """Download files that the snapshot lacks."""
        directory = snapshot(self._folder, listing.commit)
        missing = [name for name in names if not (directory / name).exists()]
        files = [listing.files[name] for name in missing]
        self._check_room(files)
        with self._progress(files), ThreadPoolExecutor(_AT_A_TIME, "files") as pool:
            calls = [pool.submit(self._fetch_file, name, listing.commit) for name in missing]
            try:
                for call in as_completed(calls):
                    call.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)  # those that run remove their parts
                raise

    def _fetch_file(self, name: str, commit: str) -> None:
        for attempt in range(1, _TRIES + 1):
            try:
                hf_hub_download(
                    self._name.repo_id,
                    name,
                    revision=commit,
                    cache_dir=str(self._cache),
                    tqdm_class=self._received.bar_type,
                )
                return
            except Exception as error:
                if fault_of(error) is not HubFault.UNREACHABLE or attempt == _TRIES:
                    raise
                time.sleep(attempt)

    def _check_room(self, files: list[StoredFile]) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        blobs = self._folder / "blobs"
        absent = [each for each in files if not each.etag or not (blobs / each.etag).exists()]
        needed = sum(each.num_bytes for each in absent)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            problem = f"{needed} bytes are to be downloaded, and {self._cache} has room for {free}"
            fix = "make room, or set HF_HOME to a larger file system"
            raise self._error(HubFault.NO_ROOM, problem, fix)

    @contextlib.contextmanager
    def _progress(self, files: list[StoredFile]) -> Iterator[None]:
        """Write the progress of a download, until the block ends."""
        total, ended = sum(each.num_bytes for each in files), threading.Event()

        def report() -> None:
            is_over = False
            while not is_over:
                is_over = ended.wait(PROGRESS_EVERY_S)
                done = sum(map(self._size_of, files))
                self._write(
                    event="progress",
                    received=self._received.count,
                    done=done,
                    total=total,
                    files=len(files),
                )

        reporter = threading.Thread(target=report, daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _size_of(self, file: StoredFile) -> int:
        """Return the bytes of a file that have come."""
        blobs = self._folder / "blobs"
        if not file.etag:
            return 0
        if (blobs / file.etag).exists():
            return file.num_bytes
        sizes = [0]
        for part in blobs.glob(f"{file.etag}*.incomplete"):
            with contextlib.suppress(OSError):
                facts = part.stat()
                if facts.st_mtime >= self._began:  # else it is of a process that was killed
                    sizes.append(facts.st_size)
        return min(file.num_bytes, max(sizes))

    def _note(self, revision: str, commit: str) -> None:
        """Keep which commit a branch or tag is, for times without the hub."""
        ref = self._folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        partial = ref.with_name(f".{ref.name}.{os.getpid()}")
        partial.write_text(commit)
        partial.replace(ref)

    def _finish(self, commit: str, content: bytes | None) -> None:
        self._write(
            event="done",
            commit=commit,
            directory=str(snapshot(self._folder, commit)),
            content=None if content is None else content.hex(),
        )

    def _write(self, **fields: object) -> None:
        self._lines.write(json.dumps(fields) + "\n")
        self._lines.flush()

    def _error(self, fault: HubFault, problem: str, fix: str) -> HubError:
        return HubError(fault, str(self._name), problem, fix)

    def explained(self, error: Exception) -> HubError:
        """Return an error as the user reads it."""
        name, fault = self._name, fault_of(error)
        page, commit = f"{_host()}/{name.repo_id}", name.revision
        texts = {
            HubFault.NO_REPOSITORY: (
                f"there is no such directory, and {_host()} has no such repository, or a private "
                "one",
                "mend the name or, for a private one, log in (hf auth login, or HF_TOKEN)",
            ),
            HubFault.NO_REVISION: (f"it has no revision {commit}", f"choose one at {page}"),
            HubFault.TOKEN: (
                f"{_host()} does not accept the token",
                "log in again (hf auth login), or mend or unset HF_TOKEN",
            ),
            HubFault.GATED: (
                "access to it must be granted first",
                f"ask for it at {page}, and log in as that user (hf auth login, or HF_TOKEN)",
            ),
            HubFault.OFFLINE: (
                f"{self._cache} does not have all of it, and HF_HUB_OFFLINE is set",
                "unset it, or copy the cache of a host that has it",
            ),
            HubFault.UNREACHABLE: (
                f"{self._cache} does not have all of it, and {_host()} {_answer(error)}",
                "try again: complete files are kept; or check HF_ENDPOINT and the proxy",
            ),
            HubFault.NO_ROOM: (
                f"there is no room in {self._cache}: {_reason(error)}",
                "make room, or set HF_HOME to a larger file system",
            ),
            HubFault.CACHE: (
                f"{self._cache} cannot be written: {_reason(error)}",
                "make it writable, or set HF_HOME to another directory",
            ),
            HubFault.UNUSABLE: (str(error), "choose a repository with safetensors files"),
        }
        if isinstance(error, HubError):
            return error
        other = (
            f"the download failed: {type(error).__name__}: {_reason(error)}",
            "try again",
        )
        return self._error(fault, *texts.get(fault, other))


def fault_of(error: BaseException) -> HubFault:
    """Return what an error, or the one that it follows from, means."""
    if isinstance(error, HubError):
        return error.fault
    cause: BaseException | None = error
    while cause is not None:
        fault = _own_fault(cause)
        if fault is not HubFault.BROKEN:
            return fault
        cause = cause.__cause__ or cause.__context__
    return HubFault.BROKEN


def _own_fault(error: BaseException) -> HubFault:
    for kind, fault in (
        (BrokenIndex, HubFault.UNUSABLE),
        (GatedRepoError, HubFault.GATED),
        (DisabledRepoError, HubFault.NO_REPOSITORY),
        (RepositoryNotFoundError, HubFault.NO_REPOSITORY),
        (RevisionNotFoundError, HubFault.NO_REVISION),
        (OfflineModeIsEnabled, HubFault.OFFLINE),
    ):
        if isinstance(error, kind):
            return fault
    if isinstance(error, HfHubHTTPError):
        status = _status(error)
        # Without a token the hub answers 401 for what does not exist, too.
        unknown = HubFault.NO_REPOSITORY if get_token() is None else HubFault.TOKEN
        refusals = {401: unknown, 403: HubFault.GATED}
        is_passing = status >= 500 or status in (408, 429)
        return refusals.get(status, HubFault.UNREACHABLE if is_passing else HubFault.BROKEN)
    if any(kind.__name__ in _TRANSPORT for kind in type(error).__mro__):
        return HubFault.UNREACHABLE
    if isinstance(error, OSError):
        if error.errno in _NO_ROOM:
            return HubFault.NO_ROOM
        if error.errno in _NOT_WRITABLE:
            return HubFault.CACHE
    return HubFault.BROKEN


def _status(error: HfHubHTTPError) -> int:
    return int(getattr(error.response, "status_code", 0))


def _answer(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            return f"answers {_status(cause)}"
        cause = cause.__cause__ or cause.__context__
    return "cannot be reached"


def _host() -> str:
    """Return the hub's name, without a user or password that its address may have."""
    return urlsplit(constants.ENDPOINT).hostname or "the hub"


def _reason(error: BaseException) -> str:
    """Return one line of an error, without addresses, which may be signed."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    first = (str(error).strip().splitlines() or [""])[0]
    return _URL.sub("(address)", first)[:_MAX_SHOWN]


def _end_with_parent() -> None:
    """End this process once its parent has closed standard input, or has ended."""
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Serve the request."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print does not belong to the answers
    given: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name = RepoName(given["repo_id"], given["revision"])
    download = Download(name, Path(given["cache"]), NeededPart(given["part"]), lines)
    try:
        download.run()
    except Exception as error:
        shown = download.explained(error)
        fields = {"fault": shown.fault, "problem": shown.problem, "fix": shown.fix}
        lines.write(json.dumps({"event": "fault", **fields}) + "\n")
        lines.flush()
    os._exit(0)  # threads of the package may wait for connections


if __name__ == "__main__":
    main()
