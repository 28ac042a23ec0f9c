"""Structured output: the grammar that a request's tokens must follow. The driver compiles it and
sends masks; workers only store it, for a driver that adopts the request."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import Extension

MAX_GRAMMAR_LENGTH = 65536
"""Bound in characters. A grammar is sent with each admission of its request."""

GrammarKind: TypeAlias = Literal["json", "regex", "grammar", "choice"]


class StructuredOutput(Extension, frozen=True, tag=10, kw_only=True):
    """The grammar that a request's tokens must follow."""

    kind: GrammarKind
    """json: a JSON schema; regex: a regular expression; grammar: an EBNF grammar; choice: a JSON
    list of texts, one of which is the output."""
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
