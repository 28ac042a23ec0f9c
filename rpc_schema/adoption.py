"""Requests that an earlier driver has left running, as reported to a new one.

These messages only report. To continue a request, a driver admits it again
(`rpc_schema.step.NewRequestData`) with its tokens, its block ids and the number of tokens whose KV
is in these blocks.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Name, Positive, StepReply, StepRequest, Unsigned, Value
from rpc_schema.extensions import RequestExtensions
from rpc_schema.kv_cache import MAX_GROUPS
from rpc_schema.step import SchedulerNote, Slot

MAX_PAGE_BYTES = 2 << 20
"""Bound on a reply, without its first row."""

MAX_ROW_TOKENS = 3 << 20
"""Bound on the tokens of a row; for a longer request, only the first ones are reported."""

MAX_ROW_BLOCKS = 1 << 18
"""A request with more is reported without blocks: its KV must be computed again."""

MAX_EARLIER_VERSIONS = 2048
"""Versions of the weights that a row tells apart, besides the present one."""

RowColumn = Annotated[bytes, Meta(max_length=MAX_PAGE_BYTES + 4 * MAX_ROW_TOKENS)]


class VersionSpan(Value, frozen=True, kw_only=True):
    """Tokens of a request that weights of one version have sampled: those behind the span before,
    or behind the ones that came with its admission."""

    version: Unsigned | None
    """Number of the version; None: of several, which are not told apart any more."""
    end: Count
    """Position behind the last of them."""


class RequestRow(Value, frozen=True, kw_only=True):
    """A request with a row, in its state after the last step known to have succeeded."""

    slot: Slot
    req_id: Name
    num_prompt_tokens: Positive
    num_tokens: Count
    """Number of its tokens in the reply. The output rank has all of them; other ranks have those of
    the request's admission."""
    num_computed_tokens: Count
    """Leading tokens whose KV this rank has in the blocks; 0 if it guarantees none. An upper bound
    if a feature of the request may refuse tokens."""
    num_blocks: Count
    """Number of its blocks of the first group in the reply."""
    num_more_blocks: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] = ()
    """Number of its blocks of each further group in the reply."""
    extensions: RequestExtensions
    """Extensions of its admission."""
    note: SchedulerNote
    weights_version: Unsigned
    """Number of the version of the weights that have computed its KV and sampled its tokens since
    its admission, but for those of earlier_versions."""
    earlier_versions: Annotated[tuple[VersionSpan, ...], Meta(max_length=MAX_EARLIER_VERSIONS)] = ()
    """Versions since its admission that an update has replaced while the row was kept, in their
    order. Its blocks have KV of theirs too. Ranks that do not sample lack later tokens."""
    num_admitted_tokens: Count = 0
    """Number of tokens that came with its admission. What has sampled those, its note may say."""
    num_recomputed_tokens: Count = 0
    """Leading tokens whose KV was computed again in place (RecomputeRequests), perhaps after the
    tokens behind them were sampled. So were the experts that are kept with it."""


class AdoptRequests(StepRequest["AdoptRequestsReply"], frozen=True, tag=70, kw_only=True):
    """Report the requests from first_slot on. Steps that failed, or never had a result, are rolled
    back first. For a driver that attached with keep_requests, before its first step; and for one
    that has the results of all its steps, to recompute them (RecomputeRequests)."""

    first_slot: Count = 0


class AdoptRequestsReply(StepReply, frozen=True, tag=70, kw_only=True):
    """Rows by ascending slot, as many as fit into the reply."""

    rows: Annotated[tuple[RequestRow, ...], Meta(max_length=65535)]
    next_slot: Count
    """First slot for the next AdoptRequests; 0 if no row follows."""
    token_ids: RowColumn = b""
    """Little-endian int32: the tokens of all rows, concatenated."""
    block_ids: RowColumn = b""
    """Little-endian int32: the blocks of all rows, concatenated; those of a row are ordered by
    group. The null block (0) replaces a block behind a window, which another request may use by
    now."""
