"""What the ranks of a link must have alike. Knows packages by their names, and imports none."""

import contextlib
from importlib import metadata
from typing import Final

_PACKAGES: Final = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def link_software() -> str:
    """Return HelloReply.link_software."""
    found = []
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return ", ".join(found)
