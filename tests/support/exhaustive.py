"""A pytest plugin: tests that show little beyond others run with `--exhaustive` only, which
`make test-all` gives. A test or parameter that is marked `exhaustive` is such a test; so are those
of a function marked `each_value` that repeat values of parameters which others have had."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

NAME = "--exhaustive"
Key = TypeVar("Key")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(NAME, action="store_true", help="run tests that show little beyond others too")


def exhaustively(*values: object) -> object:
    """Return a parameter's value, or those of several, that only --exhaustive adds."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def seeds(few: int, *, of: int) -> list[object]:
    """Return the numbers below `of`, all but `few` marked exhaustive: for tests by random input."""
    return [*range(few), *map(exhaustively, range(few, of))]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(NAME):
        return
    left_out = {item for item in items if item.get_closest_marker("exhaustive") is not None}
    left_out |= repeating(item for item in items if item not in left_out)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def repeating(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests marked each_value that others of their functions make superfluous."""
    functions: dict[object, dict[pytest.Item, Mapping[str, str]]] = defaultdict(dict)
    for item in items:
        if item.get_closest_marker("each_value") is not None and hasattr(item, "callspec"):
            values = {name: repr(value) for name, value in item.callspec.params.items()}
            functions[item.parent, item.originalname][item] = values
    found: set[pytest.Item] = set()
    for combinations in functions.values():
        found |= combinations.keys() - covering(combinations)
    return found


def covering(combinations: Mapping[Key, Mapping[str, str]]) -> set[Key]:
    """Return few keys, the earlier ones first, whose combinations have each value that occurs."""
    missing = {value for values in combinations.values() for value in values.items()}
    chosen: set[Key] = set()
    while missing:
        best = max(combinations, key=lambda key: len(missing & combinations[key].items()))
        chosen.add(best)
        missing -= combinations[best].items()
    return chosen
