"""The tools of a chat: functions that the model may call, or must."""

import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from worker_client.errors import RequestError, request_error
from worker_client.inputs.request_fields import Json
from worker_client.service.fields import BodyFields
from worker_client.service.tool_grammar import Function

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION: Final = "function"
_CHOICE_FIX: Final = (
    'give "none", "auto", "required" or {"type": "function", "function": {"name": ...}}'
)


class ChatTools(NamedTuple):
    """Tools of a request that may call some."""

    given: list[dict[str, Any]]
    """Definitions of tools, for templates."""
    functions: Sequence[Function]
    """Those that the model may call: all, or the one that the request has named."""
    is_required: bool
    """True if the output must be calls."""
    several: bool
    """False if it may have one call only."""


def take_tools(fields: BodyFields) -> ChatTools | None:
    """Return a body's tools; None if the model may call none. Raises RequestError."""
    given, choice = fields.take_raw("tools"), fields.take_raw("tool_choice")
    several = fields.take("parallel_tool_calls", bool, True)
    functions = _read_tools([] if given is None else given)
    if not functions:
        if choice not in (None, "none"):
            fix = "give tools, or leave it out"
            raise request_error("tool_choice", choice, "there are no tools", fix)
        return None
    tools: list[Any] = given if isinstance(given, list) else []
    if choice == "none":
        return None
    if choice in (None, "auto", "required"):
        return ChatTools(tools, functions, choice == "required", several)
    return ChatTools(tools, [_named(choice, functions)], True, False)


def _named(choice: Json, functions: Sequence[Function]) -> Function:
    """Return the function that a tool_choice names."""
    own = choice.get(_FUNCTION) if isinstance(choice, dict) else None
    if not isinstance(own, dict) or (isinstance(choice, dict) and choice.get("type") != _FUNCTION):
        raise request_error("tool_choice", choice, "it is no choice of a tool", _CHOICE_FIX)
    name = own.get("name")
    found = next((each for each in functions if each.name == name), None)
    if found is None:
        names = ", ".join(each.name for each in functions)
        problem = "there is no tool of this name"
        raise request_error("tool_choice.function.name", name, problem, f"use one of {names}")
    return found


def _read_tools(given: Json) -> list[Function]:
    if not isinstance(given, list):
        raise request_error("tools", given, "tools is no list", "give a list of functions")
    if len(given) > MAX_TOOLS:
        raise request_error("tools", len(given), "too many", f"give at most {MAX_TOOLS}")
    functions: dict[str, Function] = {}
    for place, each in enumerate(given):
        path = f"tools[{place}]"
        found = _read_tool(each, path)
        if found.name in functions:
            fix = "give each name once"
            raise request_error(f"{path}.function.name", found.name, "it occurs twice", fix)
        functions[found.name] = found
    return list(functions.values())


def _read_tool(given: Json, path: str) -> Function:
    if not isinstance(given, dict):
        raise _no_function(path, given)
    if given.get("type", _FUNCTION) != _FUNCTION:
        fix = 'give {"type": "function", "function": {...}}'
        raise request_error(f"{path}.type", given["type"], "the tool is not served here", fix)
    own = given.get(_FUNCTION)
    if not isinstance(own, dict):
        raise _no_function(f"{path}.function", own)
    name, parameters = own.get("name"), own.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = "give 1 to 64 letters, digits, underscores and hyphens"
        raise request_error(f"{path}.function.name", name, "it is no name of a function", fix)
    strict = own.get("strict")
    if not isinstance(strict, bool | None):
        fix = "give true or false"
        raise request_error(f"{path}.function.strict", strict, "it is no boolean", fix)
    if parameters is not None and not isinstance(parameters, dict):
        problem, fix = "the parameters are no schema", "give a JSON schema"
        raise request_error(f"{path}.function.parameters", parameters, problem, fix)
    return Function(name, parameters, is_strict=bool(strict))


def _no_function(path: str, value: Json) -> RequestError:
    fix = 'give {"type": "function", "function": {"name": ..., "parameters": {...}}}'
    return request_error(path, value, f"{path} is no function", fix)
