"""What is installed: the wheel's files and metadata, and the versions that it claims."""

import ast
import importlib.metadata
import re
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.wheel import PACKAGES, build_wheel

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names in a wheel, and its metadata."""
    with zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("source"))) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        return names, message_from_string(archive.read(metadata).decode())


def test_wheel_has_types_data_and_licence(wheel: tuple[list[str], Message]):
    names, _ = wheel
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for path in (ROOT / "worker_daemon" / "kernels" / "tuned").iterdir():
        assert path.relative_to(ROOT).as_posix() in names


def test_metadata_names_licence_and_no_address(wheel: tuple[list[str], Message]):
    _, metadata = wheel
    assert metadata["License-Expression"] == "Apache-2.0"
    assert not {"Author", "Author-email", "Home-page", "Project-URL"} & set(metadata.keys())


def test_packages_import_all_that_they_require():
    required = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["worker"]]
    modules = defaultdict(set)
    for module, distributions in importlib.metadata.packages_distributions().items():
        for distribution in distributions:
            modules[canonicalize_name(distribution)].add(module)
    folders = ("model_hub", "rendezvous", "rpc_schema", "client", "worker_daemon", "worker_host")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    imported = {module for path in files for module in imports_of(path)}
    for requirement in map(Requirement, required):
        names = modules[canonicalize_name(requirement.name)] or {requirement.name}
        assert names & imported, f"{requirement.name} is required and never imported"


def imports_of(path: Path) -> Iterator[str]:
    """Yield the first words of the modules that a file imports, late imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_claimed_versions_are_those_of_the_matrix():
    """Check that no classifier names a version that cannot be tested."""
    matrix = (ROOT / ".ci" / "matrix").read_text()
    (pythons,) = re.findall(r"^PYTHONS=\$\{PYTHONS:-(.*)\}$", matrix, re.MULTILINE)
    (torches,) = re.findall(r"^TORCHES=\$\{TORCHES:-(.*)\}$", matrix, re.MULTILINE)
    python = "Programming Language :: Python :: "
    claimed = [name.removeprefix(python) for name in PROJECT["classifiers"] if python in name]
    assert claimed == ["3", *pythons.split()]
    assert PROJECT["requires-python"] == f">={claimed[1]}"
    (oldest,) = re.findall(
        r"^torch>=(.*)$", "\n".join(PROJECT["optional-dependencies"]["worker"]), re.MULTILINE
    )
    assert torches.split() == [f"{oldest}.0", "newest"]
