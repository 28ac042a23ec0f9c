"""A bias on the logit of one token."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Extension


class TokenBias(Extension, frozen=True, tag=100, kw_only=True):
    """A request prefers one token, or avoids it."""

    token_id: Count
    bias: Annotated[float, Meta(ge=-100.0, le=100.0)]
    """Added to the token's logit, before stop tokens are banned."""
