"""Shows a value of any type and size in an error, in bounded time."""

import reprlib
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

MAX_LENGTH: Final = 200
"""Bound on the characters."""
_MAX_ENTRIES: Final = 50


class _BoundedRepr(reprlib.Repr):
    """A Repr that does not sort: of a large set or mapping, it would read all entries."""

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        shown = (f"{self.repr1(k, level - 1)}: {self.repr1(v, level - 1)}" for k, v in x.items())
        return self._joined(shown, len(x), "{", "}")

    def repr_set(self, x: Iterable[Any], level: int) -> str:
        listed = list(islice(x, _MAX_ENTRIES + 1))
        return self._joined((self.repr1(each, level - 1) for each in listed), len(listed), "{", "}")

    repr_frozenset = repr_set

    def repr_bytes(self, x: bytes, level: int) -> str:
        return repr(x[:MAX_LENGTH])

    @staticmethod
    def _joined(entries: Iterable[str], count: int, begin: str, end: str) -> str:
        more = ["..."] if count > _MAX_ENTRIES else []
        return begin + ", ".join([*islice(entries, _MAX_ENTRIES), *more]) + end


def shown(value: object) -> str:
    """Return the beginning of a value's repr, or its type if it has none."""
    bounds = _BoundedRepr()
    bounds.maxlist = bounds.maxtuple = bounds.maxarray = bounds.maxdeque = _MAX_ENTRIES
    bounds.maxstring = bounds.maxother = bounds.maxlong = MAX_LENGTH
    try:
        text = bounds.repr(value)
    except Exception:  # a repr may raise anything, as that of a huge number does
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_LENGTH else f"{text[: MAX_LENGTH - 3]}..."
