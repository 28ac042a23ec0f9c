"""Tokens refused at random."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Extension


class RandomRefusals(Extension, frozen=True, tag=101, kw_only=True):
    """A request does not gain some of its tokens, and computes them again."""

    percent: Annotated[int, Meta(ge=0, le=90)]
