"""Structured output: the grammar that a request's tokens keep to. The driver compiles it, and steps
bring masks; workers keep it for a driver that adopts the request."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import Extension

MAX_GRAMMAR_LENGTH = 65536
"""Characters of a grammar. It travels with each admission of its request."""

GrammarKind: TypeAlias = Literal["json", "regex", "grammar", "choice"]


class StructuredOutput(Extension, frozen=True, tag=10, kw_only=True):
    """A request's tokens keep to a grammar."""

    kind: GrammarKind
    """json: a JSON schema; regex: a regular expression; grammar: an EBNF grammar; choice: a JSON
    list of texts."""
    text: Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_LENGTH)]
