"""Values of callers as the types of a struct's fields, or the error of the first that is wrong."""

from collections.abc import Iterable
from itertools import chain
from typing import Final, NoReturn, TypeAlias, TypeVar

import msgspec
import numpy as np
from msgspec.inspect import (
    BoolType,
    CollectionType,
    DictType,
    FloatType,
    IntType,
    NoneType,
    StrType,
    StructType,
    TupleType,
    UnionType,
)

from worker_client.errors import RequestError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value as JSON has it."""

SAMPLING: Final = "sampling."
"""Path of the fields of SamplingParams in the errors of a GenerationRequest."""

_MAX_ENTRIES: Final = 1 << 14
_PLAIN: Final = frozenset((int, float, str, bool, type(None)))

StructT = TypeVar("StructT", bound=msgspec.Struct)


def plain(given: StructT, path: str = "", *, is_json: bool = False) -> StructT:
    """Return a struct with the values of `given`, which may be of any type: lists as tuples,
    numpy's numbers as Python's. It is the same one if it has those already. path: of the struct, in
    errors. is_json: keys of mappings are texts.

    Raises:
        RequestError: a field has the wrong type or is out of bounds; names it by its path.
    """
    kind, values = type(given), msgspec.structs.asdict(given)
    try:
        if not _has_plain_types(values.values()):  # equal values may have other types
            return msgspec.convert(_unwrapped(values), kind, str_keys=is_json)
        found = msgspec.convert(values, kind, str_keys=is_json)
    except Exception:  # a method of a value may raise anything
        each = {name: _plain(kind, name, own, path, is_json) for name, own in values.items()}
        return kind(**each)
    return given if found == given else found


def _plain(kind: type[StructT], name: str, value: object, path: str, is_json: bool) -> object:
    try:
        found = msgspec.convert({name: _unwrapped(value)}, kind, str_keys=is_json)
        return getattr(found, name)
    except Exception as error:  # as above
        _refuse(kind, name, value, path, error)


def _refuse(kind: type, name: str, value: object, path: str, error: Exception) -> NoReturn:
    wanted = {each.name: each.type for each in msgspec.structs.fields(kind)}[name]
    reason = str(error).replace("`$.", f"`{path}")
    raise RequestError(
        f"{path}{name} has the wrong type or is out of bounds: {reason}",
        field=path + name,
        value=value,
        fix=f"give {described(msgspec.inspect.type_info(wanted))}",
    ) from None


def flat(error: RequestError, prompt: str = "prompt") -> RequestError:
    """Return an error with the name that a field has in JSON, where sampling options lie beside the
    others. prompt: the field that the prompt was made of."""
    return error.named(prompt if error.field == "prompt" else error.field.removeprefix(SAMPLING))


def _has_plain_types(values: Iterable[object]) -> bool:
    """Return True if values and what they hold have types that a message can carry."""
    return all(
        type(value) in _PLAIN
        or (isinstance(value, tuple | list) and _has_plain_types(value))
        or (isinstance(value, dict) and _has_plain_types(chain(value, value.values())))
        or isinstance(value, msgspec.Struct)
        for value in values
    )


def _unwrapped(value: object) -> object:
    """Return a value without numpy's scalars and one-dimensional arrays, and without types derived
    from texts; a longer one than any field may have as it is."""
    if isinstance(value, list | tuple | dict | np.ndarray) and len(value) > _MAX_ENTRIES:
        return value
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 1):
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list | tuple):
        return [_unwrapped(each) for each in value]
    if isinstance(value, dict):
        return {_unwrapped(key): _unwrapped(own) for key, own in value.items()}
    return value


def described(kind: msgspec.inspect.Type) -> str:
    """Return what a value of a type is, in words."""
    match kind:
        case BoolType():
            text = "true or false"
        case NoneType():
            text = "none"
        case IntType():
            text = f"a whole number{_range(kind.ge, kind.le)}"
        case FloatType():
            text = f"a number{_range(kind.ge, kind.le)}"
        case StrType():
            text = f"a text{_length(kind, 'characters')}"
        case CollectionType():
            text = f"a list{_length(kind, 'entries')}, each {described(kind.item_type)}"
        case TupleType():
            text = f"a list of {' and '.join(map(described, kind.item_types))}"
        case DictType():
            key, value = described(kind.key_type), described(kind.value_type)
            text = f"a mapping{_length(kind, 'entries')} from {key} to {value}"
        case UnionType():
            text = ", or ".join(map(described, kind.types))
        case StructType():
            text = f"an object with {', '.join(each.name for each in kind.fields)}"
        case _:
            text = "an object"
    return text


def _range(low: float | None, high: float | None) -> str:
    return "" if low is None else f" from {low} to {high}"


def _length(kind: StrType | CollectionType | DictType, of: str) -> str:
    low, high = kind.min_length, kind.max_length
    if high is not None:
        return f" of {low or 0} to {high} {of}"
    return "" if low is None else f" of at least {low} {of}"
