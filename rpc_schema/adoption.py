"""What a new driver learns of the requests that an earlier one has left running.

Nothing in here makes a request run again: a driver that goes on with one admits it anew
(`rpc_schema.step.NewRequestData`) with its tokens, its block ids and the count of tokens whose KV
is in these blocks.
"""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Count, Name, Positive, StepReply, StepRequest, Value
from rpc_schema.extensions import RequestExtensions
from rpc_schema.kv_cache import MAX_GROUPS
from rpc_schema.step import SchedulerNote, Slot

MAX_PAGE_BYTES = 2 << 20
"""Of a reply, beyond its first row."""

MAX_ROW_TOKENS = 3 << 20
"""Of a longer request the first ones are told."""

MAX_ROW_BLOCKS = 1 << 18
"""A request with more is told without blocks: its KV must be computed again."""

RowColumn = Annotated[bytes, Meta(max_length=MAX_PAGE_BYTES + 4 * MAX_ROW_TOKENS)]


class RequestRow(Value, frozen=True, kw_only=True):
    """A request that has a row, as far as the rank vouches for it: up to the last step of which it
    knows that it ended well."""

    slot: Slot
    req_id: Name
    num_prompt_tokens: Positive
    num_tokens: Count
    """Of its tokens, how many the reply has. The output rank knows them all, others those that came
    with the request's admission."""
    num_computed_tokens: Count
    """Leading tokens whose KV this rank has in the blocks; 0 where it vouches for none."""
    num_blocks: Count
    """Of its blocks of the first group, how many the reply has."""
    num_more_blocks: Annotated[tuple[Count, ...], Meta(max_length=MAX_GROUPS)] = ()
    """The same of each further group."""
    extensions: RequestExtensions
    """As it was admitted."""
    note: SchedulerNote


class AdoptRequests(StepRequest["AdoptRequestsReply"], frozen=True, tag=70, kw_only=True):
    """Tell which requests there are, from first_slot on. Steps that failed, or whose result never
    came about, are taken back first. For a driver that attached with keep_requests, before its
    first step."""

    first_slot: Count = 0


class AdoptRequestsReply(StepReply, frozen=True, tag=70, kw_only=True):
    """Rows by ascending slot, as many as fit."""

    rows: Annotated[tuple[RequestRow, ...], Meta(max_length=65535)]
    next_slot: Count
    """The first slot that the next AdoptRequests is to name; 0 where no row follows."""
    token_ids: RowColumn = b""
    """Little-endian int32: the tokens of all rows, one after the other."""
    block_ids: RowColumn = b""
    """The same with their blocks, those of a row group after group. The null block (0) stands where
    a window has left a block behind, which others may have by now."""
