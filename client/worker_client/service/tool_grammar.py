"""Grammars of outputs that call functions, with other text or without: in the form that the model
writes calls in, with arguments by the functions' schemas. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from worker_client.service.tool_calls import ToolForm, marks_of

ARGUMENTS_MARK: Final = "[ARGS]"
"""Between name and arguments, in newer tokenizers of Mistral."""
_SPACED: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""Form of JSON in templates, which models have learned."""
_NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: Final = {"type": "object"}
_TEXT: Final = r"(.|\n)*"
_BLANK: Final = r"[ \t\r\n]*"
_LINE: Final = json.dumps("\n")


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
    is_strict: bool = False
    """True if its arguments follow the schema also among text."""


def call_grammar(
    form: ToolForm, functions: Sequence[Function], special: Mapping[str, int], *, several: bool
) -> str:
    """Return the grammar of calls alone, in llguidance's form of Lark. special: ids of the special
    tokens that mark calls (written_marks). several: the output may have more than one call."""
    terms = _Terms(form, special)
    one = f"{terms.opener} {terms.body(several=several)}"
    if form is ToolForm.LLAMA3_JSON:
        one = "call"  # its templates ask for a single one
    elif form is ToolForm.HERMES and several:
        one = f"{one} ({_LINE} {one})*"
    elif terms.is_named and several:
        one = f"({one})+"
    return "\n".join([f"start: {one}", *_calls(terms, functions, lambda _: True)])


def text_grammar(
    form: ToolForm, functions: Sequence[Function], special: Mapping[str, int], *, several: bool
) -> str:
    """Return the grammar of a text with such calls in it, or without. What begins as a call is one,
    of these functions only; those that are not strict take any object."""
    terms = _Terms(form, special)
    mark = re.escape(terms.mark)
    body, times = terms.body(several=several), "*" if several else "?"
    if form is ToolForm.LLAMA3_JSON:  # calls stand in place of text
        lines = ["start: BEFORE call | SAID", f"BEFORE: /{_BLANK}({mark})?{_BLANK}/"]
        lines.append(rf"SAID: /{_TEXT}/ & ~/{_BLANK}(\{{|{mark}){_TEXT}/")
        if terms.is_special:
            lines[0] += f" | {terms.opener} BEFORE call"
    elif terms.is_special:
        lines = [f"start: (SAID {terms.opener} {body}){times} SAID", f"SAID: /{_TEXT}/"]
    else:  # `lazy`: the first mark ends a text
        lines = [f"start: (opened {body}){times} SAID", f"opened[lazy]: /{_TEXT}{mark}/"]
        lines.append(f"SAID: /{_TEXT}/ & ~/{_TEXT}{mark}{_TEXT}/")
    return "\n".join([*lines, *_calls(terms, functions, lambda own: own.is_strict)])


class _Terms:
    """The parts of a form's calls, as terms of Lark."""

    def __init__(self, form: ToolForm, special: Mapping[str, int]) -> None:
        self._form = form
        self._special = special
        self.mark = marks_of(form)[0]
        self.opener = self._term(self.mark)
        self.is_special = self.mark in special
        self.is_named = form is ToolForm.MISTRAL and ARGUMENTS_MARK in special
        """True if a call has its name before a mark, not in an object."""

    def _term(self, mark: str) -> str:
        return f"<[{self._special[mark]}]>" if mark in self._special else json.dumps(mark)

    def body(self, *, several: bool) -> str:
        """Return what follows the opener."""
        if self._form is ToolForm.HERMES:
            return f"{_LINE} call {_LINE} {self._term(marks_of(self._form)[1])}"
        if self.is_named:
            return "call"
        more = ' (", " call)*' if several else ""
        return f'"[" call{more} "]"'

    def call(self, name: str, arguments: str) -> str:
        """Return one call."""
        if self.is_named:
            return f"{json.dumps(name)} {self._term(ARGUMENTS_MARK)} {arguments}"
        field = "parameters" if self._form is ToolForm.LLAMA3_JSON else "arguments"
        before = f'{{"name": {json.dumps(name)}, "{field}": '
        return f'{json.dumps(before)} {arguments} "}}"'


def _calls(
    terms: _Terms, functions: Sequence[Function], follows: Callable[[Function], bool]
) -> list[str]:
    """Return the rule `call` and its parts. follows: says whether a function's arguments follow
    its schema."""
    lines = ["call: " + " | ".join(f"call{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        known = function.parameters or _NO_ARGUMENTS
        schema = {"x-guidance": _SPACED, **(known if follows(function) else _ANY_ARGUMENTS)}
        written = terms.call(function.name, f"args{number}")
        lines += [f"call{number}: {written}", f"args{number}: %json {json.dumps(schema)}"]
    return lines
