"""Imports of a package's modules without what its `__init__.py` imports beside them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec, module_from_spec


@contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Import modules of this package without running its `__init__.py` meanwhile. Nothing changes
    if it has been imported, or is not installed. Afterwards it is imported like any other: modules
    of it that are there stay. Imports of other threads must not need it meanwhile."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    bare = sys.modules[name] = module_from_spec(spec)
    try:
        yield
    finally:
        if sys.modules.get(name) is bare:
            del sys.modules[name]
