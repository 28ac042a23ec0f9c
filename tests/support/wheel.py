"""Builds the package's wheel from a copy of the sources with the installed build backend: without
network, and without changing the checkout."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    "model_hub",
    "rendezvous",
    "rpc_schema",
    "worker_client",
    "worker_daemon",
    "worker_host",
)
"""Packages in the wheel, by import name."""

_FILES: Final = ("pyproject.toml", "README.md", "LICENSE")
_DIRECTORIES: Final = (
    "model_hub",
    "rendezvous",
    "rpc_schema",
    "client",
    "worker_daemon",
    "worker_host",
    "examples",
)
"""Source directories; examples must not be in the wheel."""
_BUILD: Final = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build_wheel(scratch: Path) -> Path:
    """Build the wheel in an empty directory; return its path."""
    for name in _FILES:
        shutil.copy(ROOT / name, scratch)
    for name in _DIRECTORIES:
        shutil.copytree(ROOT / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", _BUILD, str(scratch)]
    subprocess.run(command, cwd=scratch, check=True, capture_output=True)
    return next(scratch.glob("*.whl"))
