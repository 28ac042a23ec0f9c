"""A bias on the logit of one token, in every second token of a request."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Extension, FramedExtension


class TokenBias(Extension, frozen=True, tag=100, kw_only=True):
    """A request prefers one token, or avoids it."""

    token_id: Count
    bias: Annotated[float, Meta(ge=-100.0, le=100.0)]
    """Added to the token's logit, before stop tokens are banned."""


class BiasedRows(FramedExtension, frozen=True, tag=101, kw_only=True):
    """The rows of a step whose bias counts in it."""

    slots: Annotated[bytes, Meta(max_length=1 << 17)]
    """uint16 [rows], little-endian."""
