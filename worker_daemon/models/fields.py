"""Typed reading of an untrusted JSON object; every error names the field."""

from collections.abc import Collection, Mapping
from typing import Final, TypeVar

from rpc_schema.errors import ConfigError
from worker_daemon.errors import config_error
from worker_host.plain_text import printable

MAX_INTEGER: Final = (1 << 31) - 1
"""Upper bound on integers, unless a field has a smaller one."""
_MAX_NUMBER: Final = 1e30
_MAX_CHARS: Final = 1024
_MAX_ITEMS: Final = 4096
_MAX_SHOWN: Final = 300
"""Characters of a value in an error message, which must fit into a reply."""
_T = TypeVar("_T")


class Fields:
    """Reads the fields of one JSON object. null counts as absent; errors put `prefix` before names.

    A `default` of None makes a field required; the optional_ methods return None for an absent
    field.
    """

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def with_defaults(self, defaults: Mapping[str, object]) -> "Fields":
        """Return these fields with values for those that are absent; null stays null."""
        return Fields({**defaults, **self._values}, self._prefix)

    def with_values(self, values: Mapping[str, object]) -> "Fields":
        """Return these fields, with some replaced."""
        return Fields({**self._values, **values}, self._prefix)

    def non_null(self, names: Collection[str]) -> Mapping[str, object]:
        """Return those of the named fields that are present and not null, unchanged."""
        return {name: self._values[name] for name in names if self._values.get(name) is not None}

    def has(self, name: str) -> bool:
        """Return True if the field is present, even as null."""
        return name in self._values

    def is_empty(self, name: str) -> bool:
        """Return True if the field is absent, null, false, or an empty text, list or object."""
        return not self._values.get(name)

    def full_name(self, name: str) -> str:
        """Return a field's name with the prefix."""
        return self._prefix + name

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
    ) -> int:
        value = self.optional_integer(name, minimum=minimum, maximum=maximum)
        return self._required(name, value, default)

    def optional_integer(
        self, name: str, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, "must be an integer")
        if value < minimum:
            raise self.error(name, f"must be at least {minimum}")
        if value > maximum:
            raise self.error(name, f"must be at most {maximum}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        return self._required(name, self.optional_number(name, above=above), default)

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, "must be a number")
        if not above < value <= _MAX_NUMBER:  # compares integers of any size; NaN fails
            raise self.error(name, f"must be greater than {above:g} and at most {_MAX_NUMBER:g}")
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a required list of numbers above 0."""
        value = self._required(name, self._values.get(name), None)
        if not isinstance(value, list) or len(value) > _MAX_ITEMS:
            raise self.error(name, f"must be a list of at most {_MAX_ITEMS} numbers")
        by_index = {str(index): item for index, item in enumerate(value)}
        items = Fields(by_index, self.full_name(f"{name}."))
        return tuple(items.number(index) for index in by_index)

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
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > _MAX_CHARS:
            raise self.error(name, f"must be a string of at most {_MAX_CHARS} characters")
        return value

    def optional_texts(self, name: str) -> list[str] | None:
        """Return a list of strings."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > _MAX_ITEMS:
            raise self.error(name, f"must be a list of at most {_MAX_ITEMS} strings")
        texts = [item for item in value if isinstance(item, str) and len(item) <= _MAX_CHARS]
        if len(texts) != len(value):
            raise self.error(name, "must be a list of strings")
        return texts

    def optional_integers(self, name: str) -> tuple[int, ...] | None:
        """Return the integers of a field: one non-negative integer, or a list of them."""
        value = self._values.get(name)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        numbers = tuple(
            item for item in items if isinstance(item, int) and not isinstance(item, bool)
        )
        if len(numbers) != len(items) or min(numbers, default=0) < 0:
            raise self.error(name, "must be a non-negative integer or a list of them")
        if len(numbers) > _MAX_ITEMS or max(numbers, default=0) > MAX_INTEGER:
            raise self.error(name, f"must be {_MAX_ITEMS} integers of at most {MAX_INTEGER}")
        return numbers

    def optional_object(self, name: str) -> Mapping[str, object] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return value

    def error(self, name: str, problem: str, fix: str | None = None) -> ConfigError:
        """Return the error to raise about field `name`, with its value. Without a fix, the problem
        says what the value must be."""
        field = _shown(self.full_name(name))
        problem = _shown(problem)
        fix = fix or f"in config.json, {field} {problem}"
        value = self._values.get(name)
        if len(repr(value)) > _MAX_SHOWN:
            value = _shown(repr(value))
        return config_error(field, value, f"{field} {problem}", fix)

    def _required(self, name: str, value: _T | None, default: _T | None) -> _T:
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing", "add it to config.json")
        return default


def _shown(text: str) -> str:
    """Return the beginning of an untrusted text."""
    return printable(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
