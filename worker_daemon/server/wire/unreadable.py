"""Handles requests of the lease holder that do not decode: reads their head, and makes the error
reply. A pure function of the bytes, so that all ranks refuse a request in the same way."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import inspect

from rpc_schema import step
from rpc_schema.codec import Frame, StepHead, decode_step_head
from rpc_schema.errors import InvalidStepError, TooLargeError, WireError

_STEPS: Final[Mapping[object, type[msgspec.Struct]]] = {
    kind.__struct_config__.tag: kind
    for kind in (step.ExecuteModel, step.SampleTokens, step.ExecuteDummyBatch)
}
_PLACE: Final = re.compile(r"[^:]*: (.*) - at `\$((?:\[\d+\])+)`")
"""Matches the codec's error: our prefix, then msgspec's message with the path."""


def head_of(frames: Sequence[Frame]) -> StepHead | None:
    """Return the head of a request, with epoch, link and seq; None if it does not decode."""
    try:
        return decode_step_head(frames)
    except WireError:
        return None


def is_step(head: StepHead) -> bool:
    """Return True if the request is a step, on which later steps depend."""
    return head.tag in _STEPS


def refusal(head: StepHead, frames: Sequence[Frame], error: WireError) -> Exception:
    """Return the error of the request: for a step INVALID_STEP, with field and value."""
    kind = _STEPS.get(head.tag)
    if kind is None:
        return error
    message, field, value = str(error), kind.__name__, f"{len(frames)} frames"
    match = _PLACE.fullmatch(message)
    if match is not None and not isinstance(error, TooLargeError):
        path = [int(index) for index in re.findall(r"\d+", match[2])]
        whole = _decoded(frames[0])
        message, field, value = match[1], _name(kind, path, whole), _value(whole, path)
    problem = f"the step is refused, nothing of it was applied: {message}"
    fix = "keep to the bounds in docs/protocol.md"
    return InvalidStepError(problem, field=field, value=value, fix=fix)


def _name(kind: type[msgspec.Struct], path: Sequence[int], whole: Any) -> str:
    """Return the field name at a path in a message; a struct's tag, if any, comes first."""
    where: inspect.Type = inspect.type_info(kind)
    name = ""
    for depth, index in enumerate(path):
        if isinstance(where, inspect.UnionType):
            where = _member(where, _value_at(whole, path[:depth]))
        if isinstance(where, inspect.StructType):
            place = index - (where.tag is not None)
            if not 0 <= place < len(where.fields):
                break
            field = where.fields[place]
            name, where = f"{name}.{field.name}", field.type
        else:
            name, where = f"{name}[{index}]", getattr(where, "item_type", where)
    return name.lstrip(".") or kind.__name__


def _member(union: inspect.UnionType, value: Any) -> inspect.Type:
    """Return the struct of a union that matches a value's tag."""
    tag = value[0] if isinstance(value, list) and value else None
    structs = (each for each in union.types if isinstance(each, inspect.StructType))
    return next((each for each in structs if each.tag == tag), union)


def _decoded(frame: Frame) -> Any:
    """Return a message as plain lists; None if it does not decode."""
    try:
        return msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _value_at(whole: Any, path: Sequence[int]) -> Any:
    """Return the value at a path in a message. Raises LookupError or TypeError if there is
    none."""
    for index in path:
        whole = whole[index]
    return whole


def _value(whole: Any, path: Sequence[int]) -> Any:
    """Return the value at a path in a message, shortened."""
    try:
        value = _value_at(whole, path)
    except (LookupError, TypeError):
        return "unreadable"
    return value if value is None or isinstance(value, int | float) else reprlib.repr(value)
