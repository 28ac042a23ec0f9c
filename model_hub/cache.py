"""The hub's cache on disk, as huggingface_hub lays it out: models--ORG--NAME/ with blobs/, refs/
and snapshots/COMMIT/, whose files are links to blobs. Reads only, and needs no package."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from model_hub.faults import HubError, HubFault
from model_hub.names import RepoName
from model_hub.needed_files import (
    CONFIG,
    INDEX,
    MAX_TEXT_BYTES,
    BrokenIndex,
    NeededPart,
    adapter_files,
    weight_files,
)

DEFAULT_BRANCH: Final = "main"
_MAX_REF_BYTES: Final = 100


class StoredFile(NamedTuple):
    """Identity of a file: its size, and the hash by which the hub knows its content."""

    name: str
    num_bytes: int
    etag: str
    """SHA-256 of a large file, git's hash of a small one."""


def hub_cache(environment: Mapping[str, str]) -> Path | None:
    """Return the user's cache, where huggingface_hub has it by these variables; None if the user
    has no home. It need not exist."""
    if chosen := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(chosen, environment)
    if home := environment.get("HF_HOME"):
        return _expanded(home, environment) / "hub"
    if caches := environment.get("XDG_CACHE_HOME"):
        return _expanded(caches, environment) / "huggingface" / "hub"
    home = environment.get("HOME")
    return Path(home, ".cache", "huggingface", "hub") if home else None


def _expanded(path: str, environment: Mapping[str, str]) -> Path:
    home = environment.get("HOME", "~")
    return Path(home + path[1:] if path == "~" or path.startswith("~/") else path).absolute()


def repository_folder(repo_id: str) -> str:
    """Return the name of a repository's directory in a cache."""
    return "models--" + repo_id.replace("/", "--")


def snapshot(folder: Path, commit: str) -> Path:
    """Return the directory of a commit in a repository's directory."""
    return folder / "snapshots" / commit


def known_commit(folder: Path, name: RepoName) -> str | None:
    """Return the commit that a revision was when it was last downloaded; None if it never was."""
    if name.is_commit:
        return name.revision
    try:
        with (folder / "refs" / (name.revision or DEFAULT_BRANCH)).open("rb") as file:
            text = file.read(_MAX_REF_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return None
    return text if RepoName(name.repo_id, text).is_commit else None


def find_missing(directory: Path, part: NeededPart) -> str | None:
    """Return what a snapshot lacks, as text; None if it has what is needed."""
    names = {each.name for each in directory.iterdir() if each.exists()} if _is(directory) else ()
    try:
        if part is NeededPart.ADAPTER:
            adapter_files(names)
            return None
        if CONFIG not in names:
            return f"it has no {CONFIG}"
        if part is NeededPart.MODEL:
            weight_files(names, read_index(directory))
    except BrokenIndex as error:
        return str(error)
    return None


def _is(directory: Path) -> bool:
    try:
        return directory.is_dir()
    except OSError:
        return False


def read_index(directory: Path) -> bytes | None:
    """Return the index of a snapshot's weights, or its start if it is too long; None if it has
    none."""
    try:
        with (directory / INDEX).open("rb") as file:
            return file.read(MAX_TEXT_BYTES + 1)
    except OSError:
        return None


def content_of(files: Iterable[StoredFile]) -> bytes:
    """Return the identity of config.json and weights: SHA-256 over the files' names, sizes and
    hashes."""
    digest = hashlib.sha256()
    for name, num_bytes, etag in sorted(files):
        digest.update(f"{len(name)}:{name}:{num_bytes}:{etag}\n".encode())
    return digest.digest()


def stored_content(directory: Path) -> bytes | None:
    """Return the identity of a snapshot's config.json and weights; None if it has copies in place
    of links to blobs, as caches on file systems without links have: their hashes are unknown.

    Raises:
        HubError: it lacks some of them.
    """
    problem = find_missing(directory, NeededPart.MODEL)
    if problem is not None:
        fix = "download it again"
        raise HubError(HubFault.UNUSABLE, str(directory), problem, fix)
    index = read_index(directory)
    names = [CONFIG, *weight_files({each.name for each in directory.iterdir()}, index)]
    names += [] if index is None else [INDEX]
    try:
        files = [
            StoredFile(name, path.stat().st_size, path.readlink().name)
            for name in names
            for path in [directory / name]
        ]
    except OSError:
        return None
    return content_of(files)
