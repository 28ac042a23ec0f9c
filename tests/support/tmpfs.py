"""Directories on a tmpfs, for host memory that outlives its daemon."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def tmpfs_directory():
    """An empty one, removed in the end."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
