"""Identity of a checkpoint's files: shows whether they were replaced since a model was loaded."""

import hashlib
from pathlib import Path
from typing import Final

_CONFIG_FILES: Final = ("config.json", "generation_config.json")
_SUFFIXES: Final = (".safetensors", ".safetensors.index.json", ".tensors")


def checkpoint_identity(directory: Path) -> str:
    """Return a digest of names, sizes and modification times of the files that a load may read, as
    far as they exist; empty if the directory cannot be listed."""
    digest = hashlib.sha256()
    try:
        paths = sorted(directory.iterdir())
    except OSError:
        return ""
    for path in paths:
        if path.name in _CONFIG_FILES or path.name.endswith(_SUFFIXES):
            try:
                facts = path.stat()
            except OSError:  # a link to nowhere
                continue
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()
