"""The faults between a repository's name and its files."""

from enum import StrEnum


class HubFault(StrEnum):
    """Why a name does not lead to files."""

    NAME = "name"
    """It is no name of a repository, or no revision."""
    EXTRA = "extra"
    """The package huggingface_hub is not installed."""
    NO_REPOSITORY = "no_repository"
    """There is none of this name that the token may see."""
    NO_REVISION = "no_revision"
    TOKEN = "token"
    """The hub does not know the token."""
    GATED = "gated"
    """The token's owner has not been granted access."""
    OFFLINE = "offline"
    """The cache lacks it, and the hub must not be asked."""
    UNREACHABLE = "unreachable"
    """The cache lacks it, and the hub does not answer, or only with errors."""
    NO_ROOM = "no_room"
    """The file system of the cache is full, or a limit on files was reached."""
    CACHE = "cache"
    """The cache cannot be written."""
    STALLED = "stalled"
    """No byte came for a while, or the download took too long in all."""
    UNUSABLE = "unusable"
    """The repository lacks files of a model or an adapter, or its index is broken."""
    BROKEN = "broken"
    """Anything else."""


class HubError(Exception):
    """A name that does not lead to files. Each side raises it as an error of its own."""

    def __init__(self, fault: HubFault, name: str, problem: str, fix: str) -> None:
        super().__init__(f"{name}: {problem}; fix: {fix}")
        self.fault = fault
        self.name = name
        self.problem = problem
        self.fix = fix
