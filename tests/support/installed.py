"""Clean environments with the package's wheel, made without network: third-party packages are links
to those of the test environment, only as the wheel's metadata requires."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from email import message_from_bytes
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.waiting import PATIENCE_S

COMMAND_LIMIT_S = PATIENCE_S


class Installed:
    """A virtual environment with the wheel installed."""

    def __init__(self, directory: Path, wheel: Path, extra: str = "") -> None:
        """Make it in `directory`, with the wheel's requirements for an extra, or none."""
        self.programs = directory / "bin"
        command = [sys.executable, "-m", "venv", "--without-pip", str(directory)]
        subprocess.run(command, check=True)
        places = {"base": str(directory), "platbase": str(directory)}
        packages = Path(sysconfig.get_path("purelib", "venv", vars=places))
        for distribution in _needed(_requirements(wheel), extra):
            _link(distribution, packages)
        pip = [sys.executable, "-m", "pip", "--python", str(self.programs / "python")]
        how = ["--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "install", *how, str(wheel)], check=True)

    def run(
        self, directory: Path, program: str, *words: object
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program of the environment in a directory, to its end."""
        return subprocess.run(
            [str(self.programs / program), *map(str, words)],
            cwd=directory,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )


def clean_environment() -> dict[str, str]:
    """Return our environment variables without those that let an interpreter find other
    packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}


def _requirements(wheel: Path) -> list[str]:
    """Return the requirements in a wheel's metadata."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])


def _needed(requirements: list[str], extra: str) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions that satisfy the requirements, recursively."""
    waiting = [(requirements, frozenset((extra,)))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        texts, extras = waiting.pop()
        for requirement in map(Requirement, texts):
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": name}) for name in extras):
                continue
            found = metadata.distribution(requirement.name)
            wanted = frozenset(("", *requirement.extras))
            key = (canonicalize_name(requirement.name), wanted)
            if key not in seen:
                seen.add(key)
                waiting.append((found.requires or [], wanted))
                yield found


def _link(distribution: metadata.Distribution, packages: Path) -> None:
    """Link a distribution's modules and metadata, without its commands."""
    tops = {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
    assert tops, f"{distribution.name} has no list of files"
    for top in tops:
        link = packages / top
        if not link.is_symlink():
            link.symlink_to(str(distribution.locate_file(top)))
