"""The model's own choice in place of the last tokens that a request was given."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Extension


class CheckedTokens(Extension, frozen=True, tag=102, kw_only=True):
    """A request reports what the model would have chosen in place of its prompt's last tokens."""

    count: Annotated[int, Meta(ge=1, le=254)]
