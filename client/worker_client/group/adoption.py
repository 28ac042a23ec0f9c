"""Merges the ranks' reports on the requests that an earlier driver has left in a group. Pure.

Ranks may be at different steps: the driver may have died between two sends, or a step may have
failed. Each rank guarantees its own KV up to its last successful step; the merge keeps the KV that
all of them guarantee. Sampling depends only on seed, position and logits, so dropped tokens are
sampled again with the same result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rpc_schema.adoption import AdoptRequestsReply, RequestRow, VersionSpan
from rpc_schema.errors import BadFrameError
from rpc_schema.extensions import RequestExtension
from rpc_schema.kv_cache import (
    NULL_BLOCK,
    BlockGroup,
    blocks_behind,
    blocks_for,
    has_checkpoint,
)
from worker_client.errors import AdoptionMismatch
from worker_client.scheduler_output import NewRequest


@dataclass(frozen=True, slots=True, eq=False)
class AdoptedRequest:
    """A request of an earlier driver, to be continued: see docs/scheduler-rules.md."""

    req_id: str
    token_ids: NDArray[np.int32]
    """int32 [num_tokens]: the prompt, then the tokens generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is in block_ids on every rank; less than len(token_ids). 0: it must
    be computed again, and holds no block."""
    block_ids: tuple[int, ...]
    """Blocks of the computed tokens in the first KV group. Several requests may share one.
    In a group with a window, 0 replaces blocks that no token from num_computed_tokens on sees."""
    extensions: tuple[RequestExtension, ...]
    """Extensions of its admission (NewRequest.extensions)."""
    note: bytes
    """Note of the scheduler that admitted it (NewRequest.note)."""
    slot: int
    """Present slot on the output rank; for information."""
    more_block_ids: tuple[tuple[int, ...], ...] = ()
    """Blocks of each further group, like block_ids."""
    weights_version: int = 0
    """Number of the version of the weights that have computed its KV and sampled its tokens since
    its admission, but for those of earlier_versions."""
    earlier_versions: tuple[VersionSpan, ...] = ()
    """Versions before it, which have computed KV of its blocks and sampled its tokens up to their
    ends (RequestRow.earlier_versions)."""
    num_recomputed_tokens: int = 0
    """Leading tokens whose KV was computed again in place, perhaps after the tokens behind them
    were sampled, and so were the experts that are kept with it."""
    dp_rank: int = 0
    """The replica that has it."""

    @property
    def blocks_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Blocks of each group."""
        return (self.block_ids, *self.more_block_ids)

    def as_new(
        self, block_ids: Sequence[int] = (), more_block_ids: Sequence[Sequence[int]] = ()
    ) -> NewRequest:
        """Return its admission. block_ids: blocks to append for the tokens of the step;
        more_block_ids: those of each further group."""
        more = zip_longest(self.more_block_ids, more_block_ids, fillvalue=())
        return NewRequest(
            req_id=self.req_id,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=[*self.block_ids, *block_ids],
            extensions=self.extensions,
            note=self.note,
            more_block_ids=[[*own, *appended] for own, appended in more],
        )


@dataclass(frozen=True, slots=True, eq=False)
class RankRow:
    """One rank's row of a request."""

    rank: int
    row: RequestRow
    token_ids: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    """Blocks of all groups, one group after the other."""

    @property
    def blocks_by_group(self) -> list[NDArray[np.int32]]:
        """Blocks of each group."""
        ends = np.cumsum([self.row.num_blocks, *self.row.num_more_blocks])
        return np.split(self.block_ids, ends[:-1])


def read_page(reply: AdoptRequestsReply) -> Iterator[RankRow]:
    """Split a reply's columns into its rows.

    Raises:
        BadFrameError: the columns do not match the rows.
    """
    if len(reply.token_ids) % 4 or len(reply.block_ids) % 4:
        raise BadFrameError("a column of AdoptRequestsReply is not a sequence of int32")
    tokens = np.frombuffer(reply.token_ids, "<i4")
    blocks = np.frombuffer(reply.block_ids, "<i4")
    sizes = sum(row.num_tokens for row in reply.rows), sum(map(_num_blocks, reply.rows))
    if sizes != (tokens.size, blocks.size):
        raise BadFrameError("the columns of AdoptRequestsReply do not match its rows")
    token, block = 0, 0
    for row in reply.rows:
        yield RankRow(
            reply.rank,
            row,
            tokens[token : token + row.num_tokens],
            blocks[block : block + _num_blocks(row)],
        )
        token += row.num_tokens
        block += _num_blocks(row)


def _num_blocks(row: RequestRow) -> int:
    return row.num_blocks + sum(row.num_more_blocks)


def merge(
    ranks: Sequence[Sequence[RankRow]],
    output_rank: int,
    groups: Sequence[BlockGroup],
    checkpoint_blocks: int = 0,
) -> list[AdoptedRequest]:
    """Merge the ranks' reports, in the order of the output rank's slots; requests that it lacks
    come last.

    A request is computed again from its tokens if a rank lacks it, has it in other blocks, or has
    released blocks behind a window that another rank still needs. This happens if the driver died
    while it sent the start or the end of that request. Slots may differ, if the driver died while
    it adopted. A rank never reassigns the blocks of a request that it still has.

    With checkpoint_blocks, requests go back to the last border whose block has a checkpoint: their
    states may be of a later step.

    Raises:
        AdoptionMismatch: two ranks report different data for the same request.
    """
    by_request: dict[str, dict[int, RankRow]] = {}
    for rows in (ranks[output_rank], *ranks):
        for row in rows:
            by_request.setdefault(row.row.req_id, {})[row.rank] = row
    return [
        _merge_request(rows, len(ranks), groups, checkpoint_blocks) for rows in by_request.values()
    ]


def _merge_request(
    rows: Mapping[int, RankRow],
    num_ranks: int,
    groups: Sequence[BlockGroup],
    checkpoint_blocks: int,
) -> AdoptedRequest:
    longest = max(rows.values(), key=lambda row: row.token_ids.size)
    for row in rows.values():
        _check_same(longest, row)
    num_computed = _common_kv(list(rows.values()), longest) if len(rows) == num_ranks else 0
    if checkpoint_blocks:
        own = longest.blocks_by_group[0].tolist()
        num_computed = _last_checkpoint(own, num_computed, groups, checkpoint_blocks)
    blocks = _common_blocks([row.blocks_by_group for row in rows.values()], num_computed, groups)
    if blocks is None:
        num_computed, blocks = 0, [()] * len(groups)
    return AdoptedRequest(
        req_id=longest.row.req_id,
        token_ids=longest.token_ids.astype(np.int32),
        num_prompt_tokens=longest.row.num_prompt_tokens,
        num_computed_tokens=num_computed,
        block_ids=blocks[0],
        extensions=longest.row.extensions,
        note=longest.row.note,
        slot=longest.row.slot,
        more_block_ids=tuple(blocks[1:]),
        weights_version=longest.row.weights_version,
        earlier_versions=longest.row.earlier_versions,
        num_recomputed_tokens=max(row.row.num_recomputed_tokens for row in rows.values()),
    )


def _common_blocks(
    ranks: Sequence[Sequence[NDArray[np.int32]]], num_computed: int, groups: Sequence[BlockGroup]
) -> list[tuple[int, ...]] | None:
    """Return the blocks of num_computed tokens, by group, or None if ranks have different ones or
    lack some. ranks: each rank's blocks by group."""
    if any(len(by_group) != len(groups) for by_group in ranks):
        return None
    common = []
    for group, of_ranks in zip(groups, zip(*ranks, strict=True), strict=True):
        behind, end = blocks_behind(num_computed, group), blocks_for(num_computed, group.block_size)
        seen = [own[behind:end] for own in of_ranks]
        if any(own.size < end - behind or (own == NULL_BLOCK).any() for own in seen):
            return None
        if any((own != seen[0]).any() for own in seen):
            return None
        common.append((*[NULL_BLOCK] * behind, *seen[0].tolist()))
    return common


def _common_kv(rows: Sequence[RankRow], longest: RankRow) -> int:
    """Return the number of tokens whose KV all ranks have. At least one token is left to compute;
    its step samples the next token."""
    return max(0, min(longest.token_ids.size - 1, *(row.row.num_computed_tokens for row in rows)))


def _last_checkpoint(
    block_ids: Sequence[int], num_computed: int, groups: Sequence[BlockGroup], every: int
) -> int:
    """Return the last border within num_computed tokens whose block has a checkpoint; 0 if there
    is none. block_ids: of the first group."""
    size = groups[0].block_size
    for end in range(min(num_computed // size, len(block_ids)) // every * every, 0, -every):
        if has_checkpoint(block_ids[end - 1], every):
            return end * size
    return 0


def _check_same(one: RankRow, other: RankRow) -> None:
    # Notes differ if a driver has died while it admitted an adopted request.
    for field in ("num_prompt_tokens", "extensions", "weights_version"):
        if getattr(one.row, field) != getattr(other.row, field):
            raise _mismatch(field, one, other)
    shared = other.token_ids.size
    if (one.token_ids[:shared] != other.token_ids).any():
        raise _mismatch("token_ids", one, other)


def _mismatch(field: str, one: RankRow, other: RankRow) -> AdoptionMismatch:
    return AdoptionMismatch(one.row.req_id, other.row.slot, field, (one.rank, other.rank))
