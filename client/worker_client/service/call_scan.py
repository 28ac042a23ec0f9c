"""Reads the JSON of tool calls while it comes: finds its end, and the arguments of each call as
soon as they begin. Pure."""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

_FIELDS: Final = ("arguments", "parameters")
"""Names that models give the arguments of a call."""
_STRUCTURE: Final = re.compile(r'["{}\[\]:,]')
_IN_TEXT: Final = re.compile(r'["\\]')
_ANY: Final = re.compile(r"(?s).")


class ArgumentsPart(NamedTuple):
    """Some characters of a call's arguments."""

    name: str | None
    """The function, with the first part of a call; None: more of the same call."""
    text: str


class CallScan:
    """Takes a JSON object or list, whose calls are its elements, or which is one call's
    arguments."""

    def __init__(self, accepts: Callable[[str], bool], named: str = "") -> None:
        """accepts: says whether arguments of a function are reported before all is here; without a
        name in front of them they never are. named: the function whose arguments this is."""
        self.is_done = False
        self.parts: list[ArgumentsPart] = []
        """Arguments since the last look: its reader takes them away."""
        self._accepts = accepts
        self._named = named if named and accepts(named) else ""
        self._depth = 0
        self._call_depth = 0
        """Depth of the fields of a call; 0: not known yet, or there are none."""
        self._is_in_text = False
        self._is_escaped = False
        """True if the next character is escaped."""
        self._read: list[str] | None = None
        """A text among a call's fields, as far as it is here."""
        self._key: str | None = None
        self._is_behind_colon = False
        self._name = ""
        self._open_at: int | None = None
        """Depth around the arguments that are reported now."""
        self._is_reported = False
        """True if those of the present call were, or are."""
        self._stays_in_order = True
        """False behind a call whose arguments were not: all further ones must wait for it."""

    def take(self, text: str) -> int:
        """Return the number of characters that belong to it."""
        place = 0
        while place < len(text) and not self.is_done:
            place += self._go_on(text, place)
        return place

    def _go_on(self, text: str, place: int) -> int:
        """Take the characters up to the next one that structures JSON. Return their number."""
        kind = _ANY if self._is_escaped else _IN_TEXT if self._is_in_text else _STRUCTURE
        found = kind.search(text, place)
        taken = text[place : len(text) if found is None else found.end()]
        if self._read is not None:
            self._read.append(taken)
        was_open = self._open_at is not None
        if self._is_escaped:
            self._is_escaped = False
        elif found is not None:
            self._meet(found[0])
        if was_open:
            self._report(None, taken)
        elif self._open_at is not None:
            self._report(self._name, taken[-1])
        return len(taken)

    def _report(self, name: str | None, text: str) -> None:
        """Report a part of arguments."""
        if name is None and self.parts:
            name, before = self.parts.pop()
            text = before + text
        self.parts.append(ArgumentsPart(name, text))

    def _meet(self, character: str) -> None:
        if self._is_in_text:
            self._is_escaped = character == "\\"
            if not self._is_escaped:
                self._is_in_text = False
                self._end_text()
        elif character == '"':
            self._is_in_text = True
            if self._depth == self._call_depth and self._open_at is None:
                self._read = [character]
        elif character in "{[":
            self._enter(character)
        elif character in "}]":
            self._leave()
        elif self._depth == self._call_depth:
            self._is_behind_colon = character == ":"

    def _end_text(self) -> None:
        """Take a name of a field, or the name of a function."""
        if self._read is None:
            return
        read, self._read = "".join(self._read), None
        try:
            text = msgspec.json.decode(read, type=str)
        except ValueError:
            text = ""
        if not self._is_behind_colon:
            self._key = text
        elif self._key == "name":
            self._name = text

    def _enter(self, character: str) -> None:
        if self._depth == 0:
            self._call_depth = 1 if character == "{" else 2
            if self._named and character == "{":
                self._open_at, self._name = 0, self._named
        elif self._begins_arguments(character):
            self._open_at, self._is_reported = self._depth, True
        self._depth += 1

    def _begins_arguments(self, character: str) -> bool:
        return (
            character == "{"
            and self._depth == self._call_depth
            and self._is_behind_colon
            and self._key in _FIELDS
            and self._stays_in_order
            and not self._is_reported
            and bool(self._name)
            and self._accepts(self._name)
        )

    def _leave(self) -> None:
        self._depth -= 1
        self.is_done = self._depth == 0
        if self._open_at == self._depth:
            self._open_at = None
        if self._depth == self._call_depth - 1:
            self._stays_in_order = self._stays_in_order and self._is_reported
            self._key, self._name = None, ""
            self._is_behind_colon = self._is_reported = False
