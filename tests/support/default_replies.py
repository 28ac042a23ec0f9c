"""The least reply to any request, for fake daemons and workers: derived from the table of
operations, so that a new operation needs nothing here."""

from typing import Any

import msgspec
from msgspec import inspect as mi

from rpc_schema.operations import CONTROL_OPERATIONS, STEP_OPERATIONS, ControlMessage, StepMessage


def step_reply(request: StepMessage, rank: int, **fields: object) -> Any:
    """Return the reply of a rank: these fields, and the least value of every other one."""
    ids = {"epoch": request.epoch, "seq": request.seq, "rank": rank}
    return least(STEP_OPERATIONS[type(request)].reply, **ids, **fields)


def control_reply(request: ControlMessage, **fields: object) -> Any:
    """Return the reply to a control request: these fields, and the least value of every other."""
    return least(CONTROL_OPERATIONS[type(request)].reply, call=request.call, **fields)


def least(kind: type[msgspec.Struct], **fields: object) -> Any:
    """Return a message with these fields, and for every other one its default, or the least value
    that its bounds allow."""
    required = {
        entry.name: least_value(entry.type)
        for entry in mi.type_info(kind).fields
        if entry.required and entry.name not in fields
    }
    return kind(**required, **fields)


def least_value(info: mi.Type) -> Any:  # noqa: PLR0911  # one a type
    """Return None, zero, nothing or the like, or the nearest value that the bounds allow."""
    match info:
        case mi.StructType():
            return least(info.cls)
        case mi.IntType() | mi.FloatType():
            lowest = info.ge if info.gt is None else info.gt + 1
            nearest = max(0, lowest or 0)
            return nearest if isinstance(info, mi.IntType) else float(nearest)
        case mi.StrType():
            return " " * (info.min_length or 0)
        case mi.BytesType():
            return bytes(info.min_length or 0)
        case mi.BoolType():
            return False
        case mi.NoneType():
            return None
        case mi.LiteralType():
            return info.values[0]
        case mi.EnumType():
            return next(iter(info.cls))
        case mi.VarTupleType():
            return (least_value(info.item_type),) * (info.min_length or 0)
        case mi.DictType():
            return {}
        case mi.UnionType():
            return None if info.includes_none else least_value(info.types[0])
    raise AssertionError(f"the schema has a type without a least value: {info}")
