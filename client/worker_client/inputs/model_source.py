"""Models and adapters as users name them: by a directory or by a repository of the hub.

Of a repository the driver reads configuration, tokenizer and chat template from the user's hub
cache. Daemons get its name and commit, and find the weights in the cache of their own user.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model_hub.cache import hub_cache
from model_hub.faults import HubError
from model_hub.fetching import Fetched, OnProgress, fetch
from model_hub.names import RepoName, read_name
from model_hub.needed_files import NeededPart
from worker_client.errors import HubModelError, config_error

ShowDownload = Callable[[RepoName], OnProgress]
"""Begins to show the download of a repository."""


def show_nothing(name: RepoName) -> OnProgress:
    """Show no download."""
    return lambda progress: None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model."""

    directory: Path
    """Directory that the driver reads: of a repository its snapshot, perhaps without weights."""
    sent_as: str
    """Its name for daemons (ModelConfig.model)."""
    name: str
    """Its name for people: the directory's, or the repository's."""
    model_root: Path
    """The directory under which daemons on this host find it."""
    fetched: Fetched | None = None
    """None: it is a directory."""

    @property
    def content(self) -> bytes | None:
        """Identity of what daemons are to find (LoadModel.content); None: unknown."""
        return None if self.fetched is None else self.fetched.content

    @classmethod
    def of(cls, directory: Path) -> "ModelSource":
        """Return a directory's model."""
        whole = directory.resolve()
        return cls(whole, str(whole), whole.name, whole.parent)

    def download_weights(self, show: ShowDownload = show_nothing) -> None:
        """Download a repository's weights, for daemons on this host. Raises HubModelError."""
        if self.fetched is not None:
            _fetch(self.fetched.name, NeededPart.MODEL, "model", show)


def find_model(text: str, field: str = "model", show: ShowDownload = show_nothing) -> ModelSource:
    """Find a model by a directory, which has precedence, or by org/name[@revision]. Downloads a
    repository's small files, and resolves the revision.

    Raises:
        ClientConfigError: it is neither.
        HubModelError: the hub has it not, or does not give it.
    """
    if Path(text).is_dir():
        return ModelSource.of(Path(text))
    name = _read(text, field)
    if name is None:
        fix = "name a checkpoint directory, or a repository as org/name"
        raise config_error(field, text, "no such directory", fix)
    fetched = _fetch(name, NeededPart.TEXTS, field, show)
    return ModelSource(fetched.directory, str(fetched.name), name.repo_id, fetched.cache, fetched)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A LoRA adapter."""

    sent_as: str
    """Its name for daemons."""
    name: str
    """Its name in requests, as the user has given it."""
    cache: Path | None = None
    """The hub cache that has it; None: it is a directory below the daemons' --lora-root."""


def find_adapter(
    text: str, lora_root: Path | None, *, are_local: bool, show: ShowDownload = show_nothing
) -> AdapterSource:
    """Find an adapter by a directory below the --lora-root, which has precedence, or by
    org/name[@revision], which is downloaded. Below the roots of daemons that run already a driver
    sees nothing: there a repository needs its @revision.

    Raises:
        HubModelError: the hub has it not, or does not give it.
    """
    is_directory = lora_root is not None and (lora_root / text).is_dir()
    if is_directory or not (are_local or "@" in text):
        return AdapterSource(text, text)
    name = _read(text, "lora")
    if name is None:
        return AdapterSource(text, text)
    fetched = _fetch(name, NeededPart.ADAPTER, "lora", show)
    return AdapterSource(str(fetched.name), text, fetched.cache)


def _read(text: str, field: str) -> RepoName | None:
    try:
        return read_name(text)
    except HubError as error:
        raise HubModelError(error, field) from None


def _fetch(name: RepoName, part: NeededPart, field: str, show: ShowDownload) -> Fetched:
    cache = hub_cache(os.environ)
    if cache is None:
        problem = "there is no hub cache: this user has no home"
        raise config_error(field, str(name), problem, "set HF_HOME")
    try:
        return fetch(name, cache, part, os.environ, show(name))
    except HubError as error:
        raise HubModelError(error, field) from None
