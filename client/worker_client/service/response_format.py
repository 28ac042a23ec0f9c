"""OpenAI's response_format, as structured output."""

from typing import Any, Final, Literal

import msgspec

from worker_client.errors import request_error
from worker_client.service.fields import BodyFields


class _Schema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """Outputs always follow the schema."""


class _Format(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None


FORMAT_NAMES: Final = {
    "structured_outputs": "response_format",
    "structured_outputs.json": "response_format.json_schema.schema",
}
"""Names of a body's response_format, by those of the driver (engine.renamed)."""


def take_response_format(fields: BodyFields, *, has_other: bool) -> dict[str, Any] | None:
    """Return what a body's response_format asks for, as the parser's structured_outputs; None: any
    text. has_other: there is a structured_outputs beside it. Raises RequestError."""
    found = fields.take("response_format", _Format, None)
    if found is None or found.type == "text":
        return None
    if has_other:
        fix = "give one of response_format and structured_outputs"
        raise request_error("response_format", found.type, "there are two grammars", fix)
    if found.type == "json_object":
        return {"json_object": True}
    if found.json_schema is None:
        fix = 'give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        raise request_error("response_format.json_schema", None, "there is no schema", fix)
    return {"json": found.json_schema.schema}
