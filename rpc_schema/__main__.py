"""`python -m rpc_schema`: the protocol reference as Markdown, generated from the schema
(docs/protocol.md)."""

import inspect
import sys
import textwrap
import typing

import msgspec

from rpc_schema import (
    adoption,
    codec,
    config,
    drafts,
    error_replies,
    kv_cache,
    lease,
    lifecycle,
    sampling,
    step,
    trace,
    uploads,
    weight_transfer,
)
from rpc_schema.errors import ErrorCode
from rpc_schema.operations import (
    CONTROL_OPERATIONS,
    LINK_STATES,
    LOAD_CHAIN,
    STEP_OPERATIONS,
    Rule,
    StepOperation,
)
from rpc_schema.version import PROTOCOL_VERSION

_WIDTH = 100
"""Columns of a line of text; docstrings have as many."""
TAG_STATES = typing.get_args(lifecycle.TagState)

_DIRECTIONS = (
    ("Control socket, driver to daemon", codec.CONTROL_REQUESTS),
    ("Control socket, daemon to driver", codec.CONTROL_REPLIES),
    ("Step socket, driver to daemon", codec.STEP_REQUESTS),
    ("Results socket, daemon to driver", codec.STEP_REPLIES),
    ("Events socket, daemon to all subscribers", codec.EVENTS),
)
_MODULES = (
    config,
    sampling,
    kv_cache,
    lease,
    step,
    lifecycle,
    weight_transfer,
    drafts,
    adoption,
    trace,
    uploads,
    error_replies,
)


def render() -> str:
    """Return the reference: every message with its tag and fields, then the values inside them."""
    parts = [_introduction()]
    messages: list[type[msgspec.Struct]] = []
    for title, direction in _DIRECTIONS:
        members = sorted(direction, key=_tag)
        messages += members
        parts += [f"## {title}\n", *(_describe(member) for member in members)]
    parts += ["## Values\n", *(_describe(value) for value in _values(messages))]
    parts += ["## Error codes\n", *(f"- `{code}`" for code in ErrorCode)]
    return "\n".join(parts) + "\n"


def _introduction() -> str:
    return textwrap.dedent(
        f"""\
        # Protocol {PROTOCOL_VERSION}

        Made from `rpc_schema` by `python -m rpc_schema`; do not edit.

        A message is one msgpack frame, `[tag, field, field, ...]` in the order below, followed by
        raw little-endian array frames where the message says so. At most {codec.MAX_FRAMES} frames;
        at most {codec.MAX_STEP_BYTES} bytes on the step and results sockets and
        {codec.MAX_CONTROL_BYTES} on the others. Unknown tags, missing or extra fields, and values
        out of bounds are refused before they have any effect. Only Hello and HelloReply tolerate
        extra fields. A step reply that is sent again, because its seq was repeated, has the same
        frames after an empty one. An empty frame alone on the results socket says nothing: by it
        the daemon checks that the driver's connection lasts. Some control requests may be sent
        again, with the same `call`, if the connection ends before the reply. They take effect only
        once.

        A step request is legal in the states listed with it, and only while the daemon serves.
        Otherwise it is refused, and nothing changes. The daemon reports a request as hung when it
        makes no progress for longer than the allowed silence.
        """
    )


def _values(messages: list[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    found = [
        member
        for module in _MODULES
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, msgspec.Struct)
        and member.__module__ == module.__name__
        and member.__struct_config__.array_like  # others are no part of a message
    ]
    return [member for member in found if member not in messages]


def _tag(member: type[msgspec.Struct]) -> int:
    tag = member.__struct_config__.tag
    return tag if isinstance(tag, int) else -1


def _describe(member: type[msgspec.Struct]) -> str:
    tag = _tag(member)
    head = f"### {member.__name__}" + (f" (tag {tag})" if tag >= 0 else "")
    fields = msgspec.structs.fields(member)
    rows = [
        f"| `{field.name}` | {_type_name(field.type)} | {_default(field)} |" for field in fields
    ]
    table = ["| field | type | default |", "|---|---|---|", *rows] if rows else ["No fields."]
    text = [inspect.cleandoc(member.__doc__ or ""), "", *_operation(member), *table, ""]
    return "\n".join([head, "", *text])


def _operation(member: type[msgspec.Struct]) -> list[str]:
    """Return a request's entry in the table of operations; nothing for other messages."""
    if (control := CONTROL_OPERATIONS.get(member)) is not None:
        again = "; may be sent again" if control.repeatable else ""
        return [f"Reply: `{control.reply.__name__}`. Role: {control.role}{again}.", ""]
    if (row := dict[type, StepOperation[typing.Any]](STEP_OPERATIONS).get(member)) is not None:
        silence = "a step's deadline" if row.deadline_s is None else f"{row.deadline_s:g} s"
        meeting = " and the rendezvous of the ranks" if row.meets else ""
        text = (
            f"Reply: `{row.reply.__name__}`. Role: {row.role}. Legal: {_states(row.rule)}. "
            f"Silence allowed: {silence}{meeting}."
        )
        return [textwrap.fill(text, _WIDTH), ""]
    return []


def _states(rule: Rule) -> str:
    lowest = next(state for state in LOAD_CHAIN if state in rule.load)
    load = [state for state in LOAD_CHAIN if state in rule.load]
    above = load == list(LOAD_CHAIN[LOAD_CHAIN.index(lowest) :]) and len(load) > 1
    parts = [f"from {lowest} on" if above else f"in {' or '.join(load)}"]
    parts += [
        f"{name} {' or '.join(value for value in values if value in allowed)}"
        for name, allowed, values in (
            ("link", rule.link, LINK_STATES),
            ("weights", rule.weights, TAG_STATES),
            ("KV cache", rule.kv_cache, TAG_STATES),
        )
        if len(allowed) < len(values)
    ]
    return ", ".join(parts)


def _default(field: msgspec.structs.FieldInfo) -> str:
    return "" if field.required else f"`{field.default!r}`"


def _type_name(annotation: object) -> str:
    """Return a readable type, with bounds in words and unions with |."""
    if typing.get_origin(annotation) is typing.Annotated:
        base, *metas = typing.get_args(annotation)
        return " ".join([_type_name(base), *map(_bounds, metas)])
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(repr(value) for value in typing.get_args(annotation))
    if arguments := typing.get_args(annotation):
        names = [_type_name(argument) for argument in arguments if argument is not ...]
        origin = typing.get_origin(annotation)
        if origin is tuple:
            return f"array of {names[0]}"
        return f"map of {names[0]} to {names[1]}" if origin is dict else " \\| ".join(names)
    if annotation is type(None):
        return "nil"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _bounds(meta: msgspec.Meta) -> str:
    names = {
        "ge": ">=",
        "gt": ">",
        "le": "<=",
        "lt": "<",
        "min_length": "length >=",
        "max_length": "length <=",
    }
    limits = [
        f"{words} {getattr(meta, name)}"
        for name, words in names.items()
        if getattr(meta, name) is not None
    ]
    return f"({', '.join(limits)})"


if __name__ == "__main__":
    sys.stdout.write(render())
