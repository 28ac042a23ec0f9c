"""Identity of a checkpoint's files: shows whether they were replaced since a model was loaded."""

import hashlib
from pathlib import Path
from typing import Final

_CONFIG_FILES: Final = ("config.json", "generation_config.json")
_SUFFIXES: Final = (".safetensors", ".safetensors.index.json", ".tensors")


def checkpoint_identity(directory: Path) -> str:
    """Return a digest of names, sizes and modification times of the files that a load may read.

    Raises:
        OSError: the directory cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.name in _CONFIG_FILES or path.name.endswith(_SUFFIXES):
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode())
    return digest.hexdigest()
