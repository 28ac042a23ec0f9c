"""Modules of a package that are imported without its `__init__.py`."""

import sys
from importlib import import_module

import pytest

from worker_daemon.layers.bare_package import bare_package


@pytest.fixture
def house(tmp_path, monkeypatch):
    """The name of a new package with two modules, whose __init__.py needs one that is missing."""
    name = f"house_{tmp_path.name.replace('-', '_')}"
    root = tmp_path / name
    root.mkdir()
    (root / "__init__.py").write_text("from . import roof\nfrom .cellar import missing\n")
    (root / "roof.py").write_text(f"from {name} import wall\nHEIGHT = 2 * wall.HEIGHT\n")
    (root / "wall.py").write_text("HEIGHT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for each in [each for each in sys.modules if each.split(".")[0] == name]:
        del sys.modules[each]


def test_modules_are_imported_without_what_the_package_imports(house):
    with bare_package(house):
        roof = import_module(f"{house}.roof")
    assert roof.HEIGHT == 6
    assert house not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="cellar"):
        import_module(house)


def test_package_is_whole_afterwards_with_the_modules_that_are_there(house, tmp_path):
    with bare_package(house):
        roof = import_module(f"{house}.roof")
    (tmp_path / house / "cellar.py").write_text("missing = 'found'\n")
    whole = import_module(house)
    assert whole.missing == "found" and whole.roof is roof


def test_package_that_was_imported_stays(house, tmp_path):
    (tmp_path / house / "cellar.py").write_text("missing = 'found'\n")
    whole = import_module(house)
    with bare_package(house):
        assert import_module(house) is whole
    assert sys.modules[house] is whole


def test_failure_within_leaves_nothing_bare(house):
    with pytest.raises(ModuleNotFoundError, match="attic"), bare_package(house):
        import_module(f"{house}.attic")
    assert house not in sys.modules
    with bare_package("no_such_package_here"):
        pass
