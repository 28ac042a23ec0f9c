"""Writes docker/requirements.txt: the packages of the image with the hash of each wheel, as pip
would choose them from the package index for the image's Python. Downloads only metadata. Run it
after a change of constraints.txt or of a dependency, from the repository's root:

    python3 docker/pin.py
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
TARGET: Final = ROOT / "docker" / "requirements.txt"
PYTHON: Final = "3.12"
MAX_GLIBC_MINOR: Final = 36
"""The platform tag of the base image, Debian 12."""
BUILD_NEEDS: Final = ("setuptools", "wheel")
HEADER: Final = """\
# What the image installs, by version and content: Linux on x86_64, CPython 3.12, torch for CUDA.
# docker/pin.py writes this file; tests/arch/test_pins.py checks it against constraints.txt.
"""


def main() -> None:
    """Ask pip, and write the file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    worker = project["optional-dependencies"]["worker"]
    found = resolve([*project["dependencies"], *worker, *BUILD_NEEDS])
    TARGET.write_text(HEADER + "".join(map(line, sorted(found, key=name))))


def resolve(wanted: list[str]) -> list[dict[str, Any]]:
    """Return pip's report on the packages that it would install."""
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(MAX_GLIBC_MINOR, 4, -1)]
    tags += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    platforms = [word for tag in tags for word in ("--platform", tag)]
    own = f"cp{PYTHON.replace('.', '')}"
    abis = [word for abi in (own, "abi3", "none") for word in ("--abi", abi)]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        how = ("--dry-run", "--ignore-installed", "--quiet", "--only-binary=:all:")
        where = ("--report", str(report), "--target", scratch, "--python-version", PYTHON)
        command = (sys.executable, "-m", "pip", "install", "--isolated", *how, *where)
        limits = ("--constraint", str(ROOT / "constraints.txt"))
        # Only from the package index: this machine's settings may name other sources.
        environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
        words = [*command, *platforms, *abis, *limits, *wanted]
        subprocess.run(words, check=True, env=environment)
        return json.loads(report.read_text())["install"]


def name(found: dict[str, Any]) -> str:
    """Return a distribution's normalized name."""
    return str(found["metadata"]["name"]).lower().replace("_", "-").replace(".", "-")


def line(found: dict[str, Any]) -> str:
    """Return a distribution's pin."""
    download = found["download_info"]
    if not download["url"].startswith("https://"):
        raise SystemExit(f"{download['url']} does not come from the package index")
    version, digest = found["metadata"]["version"], download["archive_info"]["hashes"]["sha256"]
    return f"{name(found)}=={version} \\\n    --hash=sha256:{digest}\n"


if __name__ == "__main__":
    main()
