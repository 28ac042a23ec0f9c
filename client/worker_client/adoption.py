"""The requests that an earlier driver has left in a group, as its ranks tell of them: put together,
and brought to what all ranks have. Knows no socket and no scheduling.

Ranks need not have stood at the same step: the driver may have died between two sends, or a step
may have failed. Each rank vouches for its own KV up to its last good step; what all of them have is
the shortest. Sampling depends on seed, position and logits alone, so tokens that are given up come
again.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from rpc_schema.adoption import AdoptRequestsReply, RequestRow
from rpc_schema.errors import BadFrameError
from rpc_schema.extensions import RequestExtension
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_behind, blocks_for
from worker_client.errors import AdoptionMismatch
from worker_client.scheduler_output import NewRequest


@dataclass(frozen=True, slots=True, eq=False)
class AdoptedRequest:
    """A request of an earlier driver, to go on with: see docs/scheduler.md."""

    req_id: str
    token_ids: NDArray[np.int32]
    """int32 [num_tokens]: the prompt, then what was generated so far."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is in block_ids on every rank; less than len(token_ids). 0: it must
    be computed anew, and holds no block."""
    block_ids: tuple[int, ...]
    """The blocks of the computed tokens, where they are, of the first group of layers. Several
    requests may share one. In a group with a window, 0 stands for those that no token from
    num_computed_tokens on sees."""
    extensions: tuple[RequestExtension, ...]
    """As it was admitted (NewRequest.extensions)."""
    note: bytes
    """What the scheduler that admitted it noted (NewRequest.note)."""
    slot: int
    """Where its row is now, on the rank that tells its tokens; for information."""
    more_block_ids: tuple[tuple[int, ...], ...] = ()
    """As block_ids, of each further group."""

    @property
    def blocks_by_group(self) -> tuple[tuple[int, ...], ...]:
        """Its blocks of each group."""
        return (self.block_ids, *self.more_block_ids)

    def as_new(
        self, block_ids: Sequence[int] = (), more_block_ids: Sequence[Sequence[int]] = ()
    ) -> NewRequest:
        """Return its admission. block_ids: those to append, for the tokens of the step;
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
    """Of all groups, one after the other."""

    @property
    def blocks_by_group(self) -> list[NDArray[np.int32]]:
        """Its blocks of each group."""
        ends = np.cumsum([self.row.num_blocks, *self.row.num_more_blocks])
        return np.split(self.block_ids, ends[:-1])


def read_page(reply: AdoptRequestsReply) -> Iterator[RankRow]:
    """Split a reply's columns over its rows.

    Raises:
        BadFrameError: they do not fit.
    """
    if len(reply.token_ids) % 4 or len(reply.block_ids) % 4:
        raise BadFrameError("a column of AdoptRequestsReply is no column of int32")
    tokens = np.frombuffer(reply.token_ids, "<i4")
    blocks = np.frombuffer(reply.block_ids, "<i4")
    sizes = sum(row.num_tokens for row in reply.rows), sum(map(_num_blocks, reply.rows))
    if sizes != (tokens.size, blocks.size):
        raise BadFrameError("the columns of AdoptRequestsReply have not the sizes of its rows")
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
    ranks: Sequence[Sequence[RankRow]], output_rank: int, groups: Sequence[BlockGroup]
) -> list[AdoptedRequest]:
    """Put together what the ranks have told, in the order of the output rank's slots; requests that
    it does not have come last.

    A request that some rank does not have, or has in other blocks, or whose window has left blocks
    behind there that another rank has yet to see, is computed anew from its
    tokens: the driver has died between telling the ranks that it begins, or ends. Its slots may
    differ, where the driver has died between telling the ranks that it adopts: no rank gives a
    request's blocks away while it has the request.

    Raises:
        AdoptionMismatch: ranks that both have a request disagree about what it is.
    """
    by_request: dict[str, dict[int, RankRow]] = {}
    for rows in (ranks[output_rank], *ranks):
        for row in rows:
            by_request.setdefault(row.row.req_id, {})[row.rank] = row
    return [_merge_request(rows, len(ranks), groups) for rows in by_request.values()]


def _merge_request(
    rows: Mapping[int, RankRow], num_ranks: int, groups: Sequence[BlockGroup]
) -> AdoptedRequest:
    longest = max(rows.values(), key=lambda row: row.token_ids.size)
    for row in rows.values():
        _check_same(longest, row)
    num_computed = _common_kv(list(rows.values()), longest) if len(rows) == num_ranks else 0
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
    )


def _common_blocks(
    ranks: Sequence[Sequence[NDArray[np.int32]]], num_computed: int, groups: Sequence[BlockGroup]
) -> list[tuple[int, ...]] | None:
    """Return the blocks of num_computed tokens, of each group, or None where ranks have other ones
    or lack some. ranks: the blocks of each group that each rank has."""
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
    """Tokens whose KV all ranks have; one is always left to compute, which samples the next."""
    return max(0, min(longest.token_ids.size - 1, *(row.row.num_computed_tokens for row in rows)))


def _check_same(one: RankRow, other: RankRow) -> None:
    for field in ("num_prompt_tokens", "extensions", "note"):
        if getattr(one.row, field) != getattr(other.row, field):
            raise _mismatch(field, one, other)
    shared = other.token_ids.size
    if (one.token_ids[:shared] != other.token_ids).any():
        raise _mismatch("token_ids", one, other)


def _mismatch(field: str, one: RankRow, other: RankRow) -> AdoptionMismatch:
    return AdoptionMismatch(one.row.req_id, other.row.slot, field, (one.rank, other.rank))
