"""Reads the option `structured_outputs` of a request, with vLLM's keys. Pure."""

import json
from collections.abc import Mapping
from typing import Any, Final

from rpc_schema.structured import MAX_GRAMMAR_LENGTH, StructuredOutput
from worker_client.errors import RequestError

FIELD: Final = "structured_outputs"
KEYS: Final = ("json", "regex", "grammar", "choice", "json_object")
_ANY_OBJECT: Final = '{"type":"object"}'


def read_structured_output(options: Mapping[str, Any]) -> StructuredOutput:
    """Return the grammar that the options ask for. Keys with null count as absent.

    Raises:
        RequestError: there is not exactly one key of KEYS, its value has the wrong type, or the
            grammar is too long.
    """
    given = {key: value for key, value in options.items() if value is not None}
    if len(given) != 1:
        raise _wrong("", sorted(given), f"give exactly one of {', '.join(KEYS)}")
    ((key, value),) = given.items()
    if key not in KEYS:
        raise _wrong(f".{key}", value, f"it is not supported: use one of {', '.join(KEYS)}")
    found = _read(key, value)
    if not 1 <= len(found.text) <= MAX_GRAMMAR_LENGTH:
        length = f"{len(found.text)} characters"
        raise _wrong(f".{key}", length, f"give 1 to {MAX_GRAMMAR_LENGTH} characters")
    return found


def _read(key: str, value: Any) -> StructuredOutput:
    if key == "json_object":
        if value is not True:
            raise _wrong(".json_object", value, "give true, or leave it out")
        return StructuredOutput(kind="json", text=_ANY_OBJECT)
    if key == "json":
        if not isinstance(value, str | dict):
            raise _wrong(".json", value, "give a JSON schema, as an object or its text")
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        return StructuredOutput(kind="json", text=text)
    if key == "choice":
        is_list = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
        if not is_list or not value:
            raise _wrong(".choice", value, "give a list of at least one text")
        return StructuredOutput(kind="choice", text=json.dumps(list(value)))
    if not isinstance(value, str):
        raise _wrong(f".{key}", value, "give a text")
    return StructuredOutput(kind="regex" if key == "regex" else "grammar", text=value)


def _wrong(key: str, value: object, fix: str) -> RequestError:
    message = "the structured output is refused"
    return RequestError(message, field=f"{FIELD}{key}", value=value, fix=fix)
