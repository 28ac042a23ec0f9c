"""The messages of a chat, as chat templates take them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from worker_client.errors import request_error
from worker_client.inputs.request_fields import Json

MESSAGES: Final = "messages"
_CALLER: Final = "assistant"
_DEVELOPER: Final = "developer"
_SYSTEM: Final = "system"
_TEXT: Final = "text"
BETWEEN_PARTS: Final = "\n"
"""Joins the text parts of a message, as in vLLM."""


def read_messages(given: Json, *, has_developer: bool = False) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, and whose calls have objects as arguments.
    has_developer: the template has that role; else such a message is the system's.

    Raises:
        RequestError: they are malformed, or have parts other than text. The template checks roles.
    """
    if not isinstance(given, list) or not given:
        raise request_error(MESSAGES, given, "there are no messages", "give a list of at least one")
    return [_read(each, f"{MESSAGES}[{place}]", has_developer) for place, each in enumerate(given)]


def _read(given: Json, path: str, has_developer: bool) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise request_error(
            path, given, f"{path} is no object", "give an object with role, content"
        )
    message: dict[str, Any] = dict(given)
    role = message.get("role")
    if not isinstance(role, str):
        raise request_error(f"{path}.role", role, "a message has no role", "give a role")
    if role == _DEVELOPER and not has_developer:
        message["role"] = _SYSTEM
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _read_calls(calls, role, f"{path}.tool_calls")
    elif message.get("content") is None and role != _CALLER:
        raise request_error(f"{path}.content", None, "the message is empty", "give a text")
    if "content" in message:
        message["content"] = _read_content(message["content"], f"{path}.content")
    return message


def _read_content(given: Json, path: str) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise request_error(path, given, f"{path} is no text", "give a text, or a list of parts")
    return BETWEEN_PARTS.join(_read_parts(given, path))


def _read_parts(given: Sequence[Json], path: str) -> Iterable[str]:
    for place, part in enumerate(given):
        own = f"{path}[{place}]"
        if isinstance(part, str):
            yield part
            continue
        if not isinstance(part, dict):
            fix = 'give {"type": "text", "text": ...}'
            raise request_error(own, part, f"{own} is no part of a message", fix)
        kind = part.get("type", _TEXT)
        if kind != _TEXT:
            fix = "give texts alone: the server has no images, sounds or files"
            raise request_error(f"{own}.type", kind, "the part is not served here", fix)
        text = part.get(_TEXT)
        if not isinstance(text, str):
            raise request_error(f"{own}.text", text, "the part has no text", "give a text")
        yield text


def _read_calls(given: Json, role: str, path: str) -> list[dict[str, Any]]:
    """Return calls of functions that the model has made before."""
    if role != _CALLER or not isinstance(given, list):
        fix = "give a list, in a message of the assistant"
        raise request_error(path, given, f"{path} has no calls", fix)
    return [_read_call(each, f"{path}[{place}]") for place, each in enumerate(given)]


def _read_call(given: Json, path: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(function, dict):
        fix = 'give {"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}'
        raise request_error(path, given, f"{path} is no call of a function", fix)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        name_path = f"{path}.function.name"
        raise request_error(name_path, name, "the call has no name", "give that of a function")
    arguments = _read_arguments(function.get("arguments"), f"{path}.function.arguments")
    return {"type": "function", **given, "function": {**function, "arguments": arguments}}


def _read_arguments(given: Json, path: str) -> Mapping[str, Any]:
    """Return arguments, which are JSON in a text, as the object that templates expect."""
    value: Any = given
    if isinstance(given, str):
        try:
            value = msgspec.json.decode(given) if given.strip() else {}
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            problem = f"the arguments are no JSON: {error}"
            fix = "give an object of JSON, as a text"
            raise request_error(path, given, problem, fix) from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        fix = "give an object of JSON, as a text"
        raise request_error(path, given, "the arguments are no object", fix)
    return value
