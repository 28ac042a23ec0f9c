"""Settings of models by their repositories' names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class HubSettings:
    """The user's hub cache, and what may be done with it."""

    cache: Path | None = None
    """Directory of the cache; None: this user has no home."""
    allow_download: bool = False
    """True if missing files may be downloaded into the cache."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For the process that downloads: it may have a token."""


NO_HUB: Final = HubSettings()
"""No cache but those that are roots, and no downloads."""
