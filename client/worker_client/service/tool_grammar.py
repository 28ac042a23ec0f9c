"""The grammar of an output that calls functions and has no other text: in the form that the model
writes calls in, with arguments by the functions' schemas. Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from worker_client.service.tool_calls import CALL_MARK, ToolForm

ARGUMENTS_MARK: Final = "[ARGS]"
"""Between name and arguments, in newer tokenizers of Mistral."""
_SPACED: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Form of JSON in templates, which models have learned."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

Mark: TypeAlias = Callable[[str], str]
"""Returns a mark of calls as a term of Lark."""


def written_marks(special: Mapping[str, int], templates: Sequence[str]) -> dict[str, int]:
    """Return the special tokens that a model writes calls with. Tokenizers of Mistral may have one
    before arguments that the chat templates do not write."""
    is_written = any(ARGUMENTS_MARK in text for text in templates)
    return {mark: own for mark, own in special.items() if is_written or mark != ARGUMENTS_MARK}


class Function(NamedTuple):
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None: it has none."""


def call_grammar(
    form: ToolForm, functions: Sequence[Function], special: Mapping[str, int], *, several: bool
) -> str:
    """Return the grammar, in llguidance's form of Lark. special: ids of the special tokens that
    mark calls (written_marks). several: the output may have more than one call."""

    def mark(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else json.dumps(text)

    is_named = form is ToolForm.MISTRAL and ARGUMENTS_MARK in special
    calls = " | ".join(f"call{number}" for number in range(len(functions)))
    lines = [f"start: {_output(form, mark, is_named, several)}", f"call: {calls}"]
    for number, (name, parameters) in enumerate(functions):
        schema = {"x-guidance": _SPACED, **(parameters or _NO_ARGUMENTS)}
        written = _call(form, name, f"args{number}", mark if is_named else None)
        lines += [f"call{number}: {written}", f"args{number}: %json {json.dumps(schema)}"]
    return "\n".join(lines)


def _output(form: ToolForm, mark: Mark, is_named: bool, several: bool) -> str:
    if form is ToolForm.LLAMA3_JSON:
        return "call"  # its templates ask for a single one
    if form is ToolForm.MISTRAL and not is_named:
        more = ' (", " call)*' if several else ""
        return f'{mark(CALL_MARK)} "[" call{more} "]"'
    if form is ToolForm.MISTRAL:
        one = f"{mark(CALL_MARK)} call"
        return f"({one})+" if several else one
    one = f'{mark("<tool_call>")} "\\n" call "\\n" {mark("</tool_call>")}'
    return f'{one} ("\\n" {one})*' if several else one


def _call(form: ToolForm, name: str, arguments: str, named_by: Mark | None) -> str:
    """Return a call: of Mistral's newer form with `named_by`, else an object."""
    if named_by is not None:
        return f"{json.dumps(name)} {named_by(ARGUMENTS_MARK)} {arguments}"
    field = "parameters" if form is ToolForm.LLAMA3_JSON else "arguments"
    before = f'{{"name": {json.dumps(name)}, "{field}": '
    return f'{json.dumps(before)} {arguments} "}}"'
