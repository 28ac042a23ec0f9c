"""Typed reading of an untrusted JSON object; every error names the field."""

import math
from collections.abc import Mapping
from typing import TypeVar

from worker_daemon.errors import ConfigError

_T = TypeVar("_T")


class Fields:
    """Reads the fields of one JSON object. null counts as absent; `prefix` goes before names in
    errors.

    A `default` of None makes a field required; the optional_ forms give None for an absent field.
    """

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def has(self, name: str) -> bool:
        """True when the field is there, even as null."""
        return name in self._values

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        return self._required(name, self.optional_integer(name, minimum=minimum), default)

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        if value < minimum:
            raise self.error(name, f"must be at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        return self._required(name, self.optional_number(name, above=above), default)

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not math.isfinite(value) or value <= above:
            raise self.error(name, f"must be finite and greater than {above:g}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        return self._required(name, self.optional_text(name), default)

    def optional_text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.error(name, "must be a string")

    def optional_texts(self, name: str) -> list[str] | None:
        """A list of strings."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, "must be a list of strings")
        texts = [item for item in value if isinstance(item, str)]
        if len(texts) != len(value):
            raise self.error(name, "must be a list of strings")
        return texts

    def optional_integers(self, name: str) -> tuple[int, ...] | None:
        """One non-negative integer, or a list of them."""
        value = self._values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        numbers = tuple(
            item for item in items if isinstance(item, int) and not isinstance(item, bool)
        )
        if len(numbers) != len(items) or min(numbers, default=0) < 0:
            raise self.error(name, "must be a non-negative integer or a list of them")
        return numbers

    def optional_object(self, name: str) -> Mapping[str, object] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return value

    def error(self, name: str, problem: str, fix: str | None = None) -> ConfigError:
        """The error to raise about field `name`, with its present value; without a fix, the problem
        says what the value has to be."""
        field = self._prefix + name
        fix = fix or f"in config.json, {field} {problem}"
        return ConfigError(f"{field} {problem}", field=field, value=self._values.get(name), fix=fix)

    def _required(self, name: str, value: _T | None, default: _T | None) -> _T:
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing", "add it to config.json")
        return default
