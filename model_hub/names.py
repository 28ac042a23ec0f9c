"""Names of repositories, as users write them and as drivers send them: org/name[@revision]."""

import re
from dataclasses import dataclass, replace
from typing import Final

from model_hub.faults import HubError, HubFault

_PART: Final = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY: Final = re.compile(f"{_PART}/{_PART}")
_REVISION: Final = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/+-]{0,253}[A-Za-z0-9_+-])?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_SHOWN: Final = 300


@dataclass(frozen=True, slots=True)
class RepoName:
    """A repository, and which of its revisions."""

    repo_id: str
    """org/name."""
    revision: str | None = None
    """A branch, a tag or a commit; None: the default branch."""

    def __str__(self) -> str:
        return self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"

    @property
    def is_commit(self) -> bool:
        """True if the revision cannot change."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> "RepoName":
        """Return the same repository at a commit."""
        return replace(self, revision=commit)


def read_name(text: str) -> RepoName | None:
    """Return the repository that a text names; None if it looks like a path.

    Raises:
        HubError: it looks like a repository's name, and is none.
    """
    repo_id, at, revision = text.partition("@")
    if repo_id.count("/") != 1 or repo_id.startswith((".", "/", "~")) or repo_id.endswith("/"):
        return None
    if not _is_repository(repo_id):
        problem = "this is neither a directory nor the name of a repository"
        fix = "name a directory, or org/name of letters, digits, '-', '_' and '.'"
        raise HubError(HubFault.NAME, text[:_MAX_SHOWN], problem, fix)
    if at and not _is_revision(revision):
        problem = "this is not the name of a revision"
        fix = "give a branch, a tag or a commit behind the @"
        raise HubError(HubFault.NAME, text[:_MAX_SHOWN], problem, fix)
    return RepoName(repo_id, revision if at else None)


def read_commit(text: str) -> RepoName | None:
    """Return the repository and commit that a driver names, org/name@COMMIT with 40 hexadecimal
    digits; None if it is anything else, such as a path."""
    repo_id, _, revision = text.partition("@")
    if _COMMIT.fullmatch(revision) is None or not _is_repository(repo_id):
        return None
    return RepoName(repo_id, revision)


def _is_repository(text: str) -> bool:
    """Apply the hub's rules (huggingface_hub's validate_repo_id), to ASCII."""
    is_plain = "--" not in text and ".." not in text and not text.endswith(".git")
    return is_plain and _REPOSITORY.fullmatch(text) is not None


def _is_revision(text: str) -> bool:
    """Apply git's rules (git-check-ref-format), and keep out what leads elsewhere as a path."""
    parts = text.split("/")
    is_plain = all(part and not part.startswith(".") for part in parts) and ".." not in text
    return is_plain and not text.endswith(".lock") and _REVISION.fullmatch(text) is not None
