"""What a process keeps for some objects: all that can be reached from them."""

import gc
from collections import Counter
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType

_SHARED = (ModuleType, type, FunctionType, BuiltinFunctionType)
"""Of the program, not of one object."""


def reachable(*roots: object) -> "Counter[type]":
    """Return how many objects of each type these refer to, directly or not, with themselves."""
    gc.collect()
    found: dict[int, object] = {}
    to_visit: list[object] = list(roots)
    while to_visit:
        each = to_visit.pop()
        if id(each) not in found and not isinstance(each, _SHARED):
            found[id(each)] = each
            to_visit += gc.get_referents(each)
    return Counter(map(type, found.values()))


def grown(counts: "Iterable[Counter[type]]", most: int) -> "Counter[type]":
    """Return by how many objects of each type the last of these counts exceeds the first, if they
    are more than `most` in all; else nothing."""
    first, *_, last = counts
    return last - first if last.total() - first.total() > most else Counter()
