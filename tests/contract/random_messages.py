"""Values of every message, derived from the schema itself: one fixed example each, and hypothesis
strategies within the declared bounds."""

import random
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from rpc_schema import codec

DIRECTIONS: dict[str, Any] = {
    "step": codec.STEP_REQUESTS,
    "step_reply": codec.STEP_REPLIES,
    "control": codec.CONTROL_REQUESTS,
    "control_reply": codec.CONTROL_REPLIES,
    "event": codec.EVENTS,
}


def messages(direction: str) -> list[type[msgspec.Struct]]:
    """The message types of a direction, in the order of its table."""
    return list(DIRECTIONS[direction])


def fixed_example(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Return a value that never changes as long as the fields do not."""
    return build(mi.type_info(kind), random.Random(kind.__name__))


def build(info: mi.Type, randomness: random.Random) -> Any:  # noqa: PLR0911  # one a type
    """Return a pseudo-random value of a type, within its bounds."""
    match info:
        case mi.StructType():
            fields = {f.name: build(f.type, randomness) for f in info.fields}
            return info.cls(**fields)
        case mi.IntType():
            low, high = bounds(info)
            return randomness.randint(low, min(high, low + 100_000))
        case mi.FloatType():
            return round(randomness.uniform(*float_bounds(info)), 3)
        case mi.StrType():
            return f"text{randomness.randrange(1000)}"
        case mi.BytesType():
            return randomness.randbytes(max(info.min_length or 0, min(8, info.max_length or 8)))
        case mi.BoolType():
            return bool(randomness.randrange(2))
        case mi.NoneType():
            return None
        case mi.LiteralType():
            return randomness.choice(info.values)
        case mi.EnumType():
            return randomness.choice(list(info.cls))
        case mi.VarTupleType():
            return tuple(build(info.item_type, randomness) for _ in range(2))
        case mi.DictType():
            keys = (build(info.key_type, randomness) for _ in range(2))
            return {key: build(info.value_type, randomness) for key in keys}
        case mi.UnionType():
            return build(randomness.choice(info.types), randomness)
    raise AssertionError(f"the schema has a type without examples: {info}")


def strategy(info: mi.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911  # one a type
    """Every value of a type that its bounds allow (long ones cut short)."""
    match info:
        case mi.StructType():
            fields = {f.name: strategy(f.type) for f in info.fields}
            return st.builds(info.cls, **fields)
        case mi.IntType():
            return st.integers(*bounds(info))
        case mi.FloatType():
            low, high = float_bounds(info)
            return st.floats(low, high, exclude_min=info.gt is not None)
        case mi.StrType():
            length = min(info.max_length or 32, 32)
            return st.text(min_size=info.min_length or 0, max_size=length)
        case mi.BytesType():
            length = min(info.max_length or 64, 64)
            return st.binary(min_size=info.min_length or 0, max_size=length)
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.LiteralType():
            return st.sampled_from(info.values)
        case mi.EnumType():
            return st.sampled_from(list(info.cls))
        case mi.VarTupleType():
            return st.lists(
                strategy(info.item_type), min_size=info.min_length or 0, max_size=3
            ).map(tuple)
        case mi.DictType():
            return st.dictionaries(strategy(info.key_type), strategy(info.value_type), max_size=3)
        case mi.UnionType():
            return st.one_of([strategy(member) for member in info.types])
    raise AssertionError(f"the schema has a type without a strategy: {info}")


def bounds(info: mi.IntType) -> tuple[int, int]:
    return (
        info.ge if info.ge is not None else -(2**63),
        info.le if info.le is not None else 2**63 - 1,
    )


def float_bounds(info: mi.FloatType) -> tuple[float, float]:
    low = info.ge if info.ge is not None else info.gt
    return (0.0 if low is None else float(low), 1e9 if info.le is None else float(info.le))
