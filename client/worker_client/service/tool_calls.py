"""Finds the tool calls in a model's text while it comes: what may be a call is held back until it
is certain, or until its arguments begin; all other text is passed on. Pure."""

import json
import re
from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Final, NamedTuple, NoReturn, TypeAlias

import msgspec

from worker_client.service.call_scan import CallScan

MAX_HEAD: Final = 256
"""Characters between the mark of a call and its JSON."""
CALL_MARK: Final = "[TOOL_CALLS]"
"""Mistral's mark of calls: a special token of its tokenizers."""


class ToolForm(StrEnum):
    """Form in which a model writes calls."""

    HERMES = "hermes"
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen."""
    LLAMA3_JSON = "llama3_json"
    """`{"name": ..., "parameters": {...}}` in place of an answer: Llama 3.1 to 3.3."""
    MISTRAL = "mistral"
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]NAME{...}`: Mistral."""


class ToolCall(NamedTuple):
    """A call of a function."""

    name: str
    arguments: str
    """A JSON object, as the model has written it; its beginning, where calls come in parts."""


class MoreArguments(NamedTuple):
    """More of the last call's arguments, where calls come in parts."""

    text: str


class BrokenCall(NamedTuple):
    """Said in place of the rest of calls that have begun, and turn out to be none."""

    name: str
    """The last function."""


Piece: TypeAlias = str | ToolCall | MoreArguments | BrokenCall


class _Marks(NamedTuple):
    """Texts of a form."""

    opener: str
    """Begins calls; Llama's may be left out."""
    closer: str = ""
    others: tuple[str, ...] = ()
    """Further special tokens that calls are written with."""


_MARKS: Final = {
    ToolForm.HERMES: _Marks("<tool_call>", "</tool_call>"),
    ToolForm.LLAMA3_JSON: _Marks("<|python_tag|>"),
    ToolForm.MISTRAL: _Marks(CALL_MARK, others=("[ARGS]", "[CALL_ID]")),
}


def marks_of(form: ToolForm) -> tuple[str, ...]:
    """Return the texts that mark calls. Where a tokenizer has a special token for one, it must be
    part of the text that a ToolCallStream gets."""
    opener, closer, others = _MARKS[form]
    return tuple(filter(None, (opener, closer, *others)))


def detected_form(templates: Iterable[str]) -> ToolForm | None:
    """Return the form that chat templates ask the model for; None if they show none."""
    text = "\n".join(templates)
    named = {name: re.search(rf'"{name}\\*"', text) for name in ("name", "arguments", "parameters")}
    if "<tool_call>" in text and named["name"] and named["arguments"]:
        return ToolForm.HERMES
    if CALL_MARK in text:
        return ToolForm.MISTRAL
    if "ipython" in text and named["name"] and named["parameters"]:
        return ToolForm.LLAMA3_JSON
    return None


class ToolCallStream:
    """Splits the text of one output into text and calls, whatever the parts that it comes in.

    Whitespace around calls is dropped. What looks like a call and is none stays text. A call that
    the output ends in is text too, unless only its closing mark is missing.

    In parts, a call begins with its arguments, and cannot become text any more: if it turns out to
    be none, BrokenCall says so."""

    def __init__(self, form: ToolForm, names: Collection[str], *, in_parts: bool = False) -> None:
        """names: of the functions. Other names make a call too if the form marks calls. in_parts:
        arguments are passed on as they come."""
        self._form = form
        self._in_parts = in_parts
        self._names = frozenset(names)
        self._held = ""
        """Text outside of a call that may belong to the next one: whitespace, a part of a mark."""
        self._call: _OpenCall | None = None
        self._has_text = False
        """True if text was passed on."""
        self._has_calls = False
        self._is_behind_call = False
        """True from a call to the next text."""

    def push(self, text: str) -> list[Piece]:
        """Return what is certain after more text."""
        pieces: list[Piece] = []
        while True:
            if self._call is None:
                text = self._outside(text, pieces)
                if self._call is None:
                    return _joined(pieces)
            rest = self._call.take(text)
            pieces += self._call.take_parts()
            if rest is None:
                return _joined(pieces)
            text = rest
            self._end_call(pieces)

    def finish(self, *, is_cut: bool = False) -> list[Piece]:
        """Return the rest, at the end of the output. is_cut: there was no room for more tokens, so
        a call that has begun stays as it is."""
        pieces: list[Piece] = []
        if self._call is not None and not (is_cut and self._call.has_begun_only):
            self._end_call(pieces)
        held, self._held = self._held, ""
        if held and not (self._is_behind_call and not held.strip(self._between)):
            pieces.append(held)
        return _joined(pieces)

    @property
    def _between(self) -> str:
        """Characters that may stand around calls."""
        return " \t\r\n;" if self._form is ToolForm.LLAMA3_JSON and self._has_calls else " \t\r\n"

    def _end_call(self, pieces: list[Piece]) -> None:
        call, self._call = self._call, None
        assert call is not None
        found, said = call.calls(self._names), call.said
        if said != found[: len(said)]:
            pieces.append(BrokenCall(said[-1].name))
        elif found:
            pieces += found[len(said) :]
            self._has_calls = self._is_behind_call = True
        else:
            self._say(call.text, pieces)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._is_behind_call:
            text = text.lstrip(self._between)
        if text:
            pieces.append(text)
            self._has_text, self._is_behind_call = True, False

    def _outside(self, new: str, pieces: list[Piece]) -> str:
        """Pass text on up to a call. Return the text behind its mark, if there is one."""
        text, self._held = self._held + new, ""
        if self._form is ToolForm.LLAMA3_JSON:
            return self._unmarked(text, pieces)
        opener = _MARKS[self._form].opener
        place = text.find(opener)
        if place < 0:
            kept = _undecided(text, opener, self._between)
            self._say(text[:kept], pieces)
            self._held = text[kept:]
            return ""
        said = text[:place].rstrip(self._between)
        place += len(opener)
        self._call = self._opened(text[len(said) : place])
        self._say(said, pieces)
        return text[place:]

    def _unmarked(self, text: str, pieces: list[Piece]) -> str:
        """Likewise, where calls stand in place of text."""
        opener, inner = _MARKS[self._form].opener, text.lstrip(self._between)
        if self._has_text:
            self._say(text, pieces)
        elif opener.startswith(inner):  # nothing, or a part of it
            self._held = text
            if inner == opener:
                self._held, self._call = "", self._opened(text)
        elif inner.startswith((opener, "{")):
            length = len(opener) if inner.startswith(opener) else 0
            place = len(text) - len(inner) + length
            self._call = self._opened(text[:place])
            return text[place:]
        else:
            self._say(text, pieces)
        return ""

    def _opened(self, opener: str) -> "_OpenCall":
        return _OpenCall(self._form, opener, self._begins)

    def _begins(self, name: str) -> bool:
        """Say whether arguments of a function are passed on before the call is complete."""
        return self._in_parts and (self._form is not ToolForm.LLAMA3_JSON or name in self._names)


class _OpenCall:
    """Text from the mark of a call on: a head, a JSON value, and a closing mark perhaps."""

    def __init__(self, form: ToolForm, opener: str, begins: Callable[[str], bool]) -> None:
        self._form = form
        self._opener = opener
        self._begins = begins
        self._said: list[tuple[str, list[str]]] = []
        """Names and arguments of the calls that have been passed on in parts."""
        self._head = ""
        """Text between mark and value."""
        self._value: list[str] = []
        self._scan = CallScan(begins)
        self._tail = ""
        """Text behind the value that is, or may be, the closing mark."""

    @property
    def text(self) -> str:
        """All that belongs to it."""
        return "".join([self._opener, self._head, *self._value, self._tail])

    def take(self, text: str) -> str | None:
        """Take more text. Return what is behind the call, or behind the mark if it turns out that
        none follows; None while neither is certain."""
        if not self._value:
            head = self._head + text
            place = self._begin(head)
            if place is None:
                self._head = head
                return None
            if place > MAX_HEAD:
                self._head = ""
                return head
            self._head, text = head[:place], head[place:]
            named = _HEAD.fullmatch(self._head)
            if named is not None and self._form is ToolForm.MISTRAL:
                self._scan = CallScan(self._begins, named[1])
        if not self._scan.is_done:
            length = self._scan.take(text)
            self._value.append(text[:length])
            text = text[length:]
        return self._behind(text) if self._scan.is_done else None

    def _begin(self, head: str) -> int | None:
        """Return the place of the value; one beyond MAX_HEAD if there is none, None if there may be
        one yet."""
        inner = head.lstrip()
        blank = len(head) - len(inner)
        is_list = self._form is ToolForm.MISTRAL and inner.startswith("[")
        place = blank if is_list else head.find("{", 0, MAX_HEAD + 1)
        if self._form is not ToolForm.MISTRAL and inner and place != blank:
            return MAX_HEAD + 1
        if place >= 0:
            return place
        return None if len(head) <= MAX_HEAD else MAX_HEAD + 1

    def _behind(self, text: str) -> str | None:
        """Return what is behind the closing mark, or behind the value if it has none."""
        closer = _MARKS[self._form].closer
        tail = self._tail + text
        inner = tail.lstrip()
        if inner.startswith(closer):
            behind = inner[len(closer) :]
            self._tail = tail[: len(tail) - len(behind)] if closer else ""
            return behind if closer else tail
        if closer.startswith(inner):
            self._tail = tail
            return None
        self._tail = ""
        return tail

    def take_parts(self) -> list[Piece]:
        """Return what can be passed on of its calls, once."""
        parts, self._scan.parts = self._scan.parts, []
        pieces: list[Piece] = []
        for name, text in parts:
            if name is None:
                self._said[-1][1].append(text)
                pieces.append(MoreArguments(text))
            else:
                self._said.append((name, [text]))
                pieces.append(ToolCall(name, text))
        return pieces

    @property
    def said(self) -> list[ToolCall]:
        """Calls as far as they have been passed on."""
        return [ToolCall(name, "".join(texts)) for name, texts in self._said]

    @property
    def has_begun_only(self) -> bool:
        """True if some was passed on, and more must come."""
        return bool(self._said) and not self._scan.is_done

    def calls(self, names: Collection[str]) -> list[ToolCall]:
        """Return its calls; none if it does not have their form."""
        if not self._scan.is_done:
            return []
        try:
            found = self._read("".join(self._value))
        except (ValueError, RecursionError):  # of both decoders
            return []
        if None in found or (self._form is ToolForm.LLAMA3_JSON and not _are_known(found, names)):
            return []
        return [call for call in found if call is not None]

    def _read(self, value: str) -> list[ToolCall | None]:
        """Return the calls in a value; None in place of what is no call. Raises ValueError."""
        _STRICT.decode(value)
        if value.startswith("["):
            return [each.call(self._form) for each in msgspec.json.decode(value, type=_LISTED)]
        if self._form is not ToolForm.MISTRAL:
            return [msgspec.json.decode(value, type=_Written).call(self._form)]
        named = _HEAD.fullmatch(self._head)
        return [None if named is None else ToolCall(named[1], value)]


class _Written(msgspec.Struct):
    """A call, as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()

    def call(self, form: ToolForm) -> ToolCall | None:
        """Return the call; None if it has none of an object's arguments."""
        written = bytes(self.arguments) or bytes(self.parameters)
        if not written and form is not ToolForm.LLAMA3_JSON:
            written = b"{}"
        if not written.startswith(b"{") or not self.name:
            return None
        return ToolCall(self.name, written.decode())


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


_STRICT: Final = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse)
"""Checks JSON with numbers of any size, which msgspec does not."""
_LISTED: Final = list[_Written]
_HEAD: Final = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
"""Name of a function, before its arguments."""


def _are_known(calls: Iterable[ToolCall | None], names: Collection[str]) -> bool:
    return all(call is not None and call.name in names for call in calls)


def _undecided(text: str, opener: str, blanks: str) -> int:
    """Return the place from which on a text may belong to a call: whitespace, and the beginning of
    its mark."""
    most = min(len(opener) - 1, len(text))
    length = next((n for n in range(most, 0, -1) if text.endswith(opener[:n])), 0)
    return len(text[: len(text) - length].rstrip(blanks))


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the pieces with neighboring texts as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, str) and isinstance(last, str):
            joined[-1] = last + piece
        else:
            joined.append(piece)
    return joined
