"""The image's requirements: each pinned by version and content, in agreement with constraints.txt
and pyproject.toml, and nothing that the build would take from elsewhere."""

import re
import runpy
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"([a-z0-9][a-z0-9-]*)==([0-9][0-9a-z.]*) --hash=sha256:([0-9a-f]{64})")


def pins():
    """{name: (version, hash)}; every line is a comment or a whole pin."""
    text = (ROOT / "docker" / "requirements.txt").read_text().replace(" \\\n    ", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = [PIN.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    assert len({match[1] for match in found}) == len(found)
    return {match[1]: (match[2], match[3]) for match in found}


def test_file_is_as_its_maker_writes_it():
    text = (ROOT / "docker" / "requirements.txt").read_text()
    header = runpy.run_path(str(ROOT / "docker" / "pin.py"))["HEADER"]
    assert text.startswith(header)
    assert "#" not in text.removeprefix(header)


def test_each_pin_has_a_hash_of_its_own():
    hashes = [digest for _, digest in pins().values()]
    assert len(hashes) > 40, "torch's CUDA build brings many"
    assert len(set(hashes)) == len(hashes)


def test_pins_are_the_versions_that_are_tested():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = pins()
    both = [tried for tried in tested if canonicalize_name(tried.name) in pinned]
    assert {"torch", "msgspec", "pyzmq", "tokenizers"} <= {tried.name for tried in both}
    for tried in both:
        assert str(tried.specifier) == f"=={pinned[canonicalize_name(tried.name)][0]}"


def test_everything_that_the_packages_need_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    needed += project["project"]["optional-dependencies"]["worker"]
    pinned = pins()
    for requirement in map(Requirement, needed):
        version, _ = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), requirement


def test_image_takes_nothing_without_a_hash_and_its_base_by_content():
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [line for line in text.splitlines() if "pip install" in line]
    assert len(installs) == 2
    assert "--require-hashes" in installs[0] and "--only-binary=:all:" in installs[0]
    assert "--no-index" in installs[1] and "'.[worker]'" in installs[1]
    bases = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert all(line.startswith("FROM ${BASE}@${BASE_DIGEST") for line in bases)
    assert "\nARG BASE_DIGEST\n" in text, "no default: nobody invents one"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    assert {f"!{path}" for line in copied for path in line.split()} <= set(ignored)
