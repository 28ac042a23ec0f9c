"""Recomputes the KV of a group's running requests after new weights, in place: RecomputeRequests.
The workers report their rows and tokens, so that no scheduler takes part."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from rpc_schema import lifecycle as lc
from rpc_schema.adoption import MAX_ROW_TOKENS, AdoptRequests, AdoptRequestsReply
from rpc_schema.errors import WorkerError
from rpc_schema.extensions import extension_of
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_for, groups_of
from rpc_schema.routed_experts import RoutedExpertsWanted
from rpc_schema.weight_transfer import (
    MAX_RECOMPUTED_BYTES,
    RecomputeRequests,
    RecomputeRequestsReply,
)
from worker_client.errors import DeadlineExceeded
from worker_client.group.adoption import RankRow, read_page
from worker_client.group.failure_state import ENDS_OWNERSHIP, Change, FailureState
from worker_client.group.group_channel import OPERATION_TIMEOUT_S, GroupChannel
from worker_client.group.outcomes import StepsInFlight
from worker_client.parts.registry import pools
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.lockstep import LockstepSlots

NOT_IN_PLACE: Final = "the weights were replaced, and the KV cannot be recomputed in place"

_Columns: TypeAlias = tuple[int, int, int, int]
"""A row of RecomputeRequests.rows."""


class Recomputed(NamedTuple):
    """The work of a recomputation."""

    num_tokens: int
    """Tokens whose KV was computed again, those of shared blocks once."""
    num_passes: int
    """Forward passes."""
    seconds: float
    """Time of the slowest rank, over all messages."""
    lost_req_ids: frozenset[str] = frozenset()
    """Requests that could not be recomputed in place."""


class RowsMessage(NamedTuple):
    """A RecomputeRequests to be."""

    rows: list[_Columns]
    token_ids: list[bytes]

    @property
    def num_tokens(self) -> int:
        """Tokens to be computed."""
        return sum(end - first for _slot, first, end, _given in self.rows)


class Recomputation:
    """Recomputes the requests of a group. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight, state: FailureState) -> None:
        self._channel = channel
        self._steps = steps
        self._state = state

    def run(self, planned: SchedulerOutput | None) -> Recomputed | None:
        """Recompute the KV of all requests with a row; no step is in flight. Requests for which
        that is not possible, or that `planned`, an unsent step, begins with KV of other weights,
        are lost: the next step's failure names them. So are all if a rank fails, or if a step has
        failed before; the result is then None.

        Raises:
            WorkerDied: a daemon is dead.
            WorkerError: the lease is lost.
        """
        slots = self._steps.slots
        assert not isinstance(slots, LockstepSlots), "refused before the update"
        if slots.must_resync:  # workers and scheduler may not know yet which rows are left
            self._steps.lose_rows(NOT_IN_PLACE)
            return None
        new = () if planned is None else planned.scheduled_new_reqs
        lost = {request.req_id for request in new if request.num_computed_tokens}
        if not len(slots):
            self._lose(lost)
            return Recomputed(0, 0, 0.0, frozenset(lost))
        try:
            rows = {row.row.req_id: row for row in self._read_rows()}
            groups = self._groups()
            kept = []
            for req_id in slots.req_ids:
                found = rows.get(req_id)
                waits = slots.awaits_sampling(req_id)
                if found is not None and is_in_place(found, groups, awaits_sampling=waits):
                    kept.append(found)
                else:
                    lost.add(req_id)
            kept.sort(key=lambda row: row.row.slot)
            most = slots.limits.max_num_batched_tokens
            replies = [self._send(each, most) for each in split_rows(plan_rows(kept, groups))]
        except (WorkerError, DeadlineExceeded) as error:
            if isinstance(error, ENDS_OWNERSHIP):
                raise
            if len(self._channel.daemons.ranks) > 1:  # others may wait for the one that failed
                self._channel.abort_links(str(error))
                self._state.apply(Change.LINK_BROKEN)
            self._steps.lose_rows(f"{NOT_IN_PLACE}: {error}", cause=error)
            return None
        self._lose(lost)
        if not lost:
            slots.share_recomputed()
        return Recomputed(
            sum(of_ranks[0].num_tokens for of_ranks in replies),
            sum(of_ranks[0].num_passes for of_ranks in replies),
            sum(max(reply.seconds for reply in of_ranks) for of_ranks in replies),
            frozenset(lost),
        )

    def _lose(self, req_ids: set[str]) -> None:
        if req_ids:
            self._steps.lose_rows(NOT_IN_PLACE, req_ids=req_ids)

    def _read_rows(self) -> Iterator[RankRow]:
        """Yield the rows of the rank that has all tokens, page by page."""
        first_slot = 0
        while True:
            ask = partial(AdoptRequests, first_slot=first_slot)

            def build_for(rank: int, ask: Any = ask) -> Any:
                return ask if rank == self._steps.output_rank else lc.GetSupportedTasks

            replies = self._channel.ask_each(build_for)
            page = next(reply for reply in replies if isinstance(reply, AdoptRequestsReply))
            yield from read_page(page)
            first_slot = page.next_slot
            if not first_slot:
                return

    def _groups(self) -> Sequence[BlockGroup]:
        kv_cache = self._channel.daemons.clients[0].get_status().kv_cache
        assert kv_cache is not None, "legal in READY only"
        return groups_of(kv_cache)

    def _send(self, message: RowsMessage, most: int) -> list[RecomputeRequestsReply]:
        """Have all ranks recompute rows, in passes of at most `most` tokens."""
        num_passes = -(-message.num_tokens // most)
        rows = np.array(message.rows, "<i4").tobytes()
        return self._channel.ask(
            partial(
                RecomputeRequests,
                rows=rows,
                token_ids=b"".join(message.token_ids),
                max_num_tokens=most,
            ),
            timeout_s=OPERATION_TIMEOUT_S + num_passes * self._channel.links.step_deadline_s,
        )


def is_in_place(row: RankRow, groups: Sequence[BlockGroup], *, awaits_sampling: bool) -> bool:
    """Return True if a row has all that its KV follows from: its tokens, and a block for each.
    Windows may have passed some. A pooled output is made of all hidden states. Of a row that waits
    for its sampling, drafts may be computed that nobody here knows."""
    asks = extension_of(row.row.extensions, RoutedExpertsWanted) is not None
    if asks and row.token_ids.size == row.row.num_admitted_tokens:
        return False  # what it has reported of its prompt is of the old weights
    is_known = not awaits_sampling or row.row.num_computed_tokens <= row.token_ids.size
    if pools(row.row.extensions) or not is_known or row.token_ids.size >= MAX_ROW_TOKENS:
        return False
    end = _end(row)
    return end > 0 and all(
        len(own) >= blocks_for(end, group.block_size)
        and (own[: blocks_for(end, group.block_size)] != NULL_BLOCK).all()
        for own, group in zip(row.blocks_by_group, groups, strict=True)
    )


def _end(row: RankRow) -> int:
    """Return the position behind the row's last computed token. Where tokens may be refused, the
    row's count is an upper bound; a failed request has a last token of NO_TOKEN."""
    known = row.token_ids.size
    if known and row.token_ids[-1] < 0:
        known -= 1
    return min(row.row.num_computed_tokens, known)


def plan_rows(
    rows: Iterable[RankRow], groups: Sequence[BlockGroup]
) -> Iterator[tuple[_Columns, bytes]]:
    """Yield the columns and the further tokens of each row, slots ascending. A row begins behind
    the full blocks that it shares with rows before it; one that shares all is left out."""
    computed: list[set[int]] = [set() for _ in groups]
    for row in rows:
        end, num_prompt = _end(row), row.row.num_prompt_tokens
        first = end
        for own, group, there in zip(row.blocks_by_group, groups, computed, strict=True):
            full = own[: end // group.block_size].tolist()
            num_shared = next((i for i, each in enumerate(full) if each not in there), len(full))
            first = min(first, num_shared * group.block_size)
            there.update(full)
        if first < end:
            given = row.token_ids[num_prompt : max(num_prompt, end)]
            yield (row.row.slot, first, end, given.size), given.astype("<i4").tobytes()


def split_rows(rows: Iterable[tuple[_Columns, bytes]]) -> Iterator[RowsMessage]:
    """Put rows into as few messages as their tokens fit into."""
    message, size = RowsMessage([], []), 0
    for columns, token_ids in rows:
        if message.rows and size + len(token_ids) > MAX_RECOMPUTED_BYTES:
            yield message
            message, size = RowsMessage([], []), 0
        message.rows.append(columns)
        message.token_ids.append(token_ids)
        size += len(token_ids)
    if message.rows:
        yield message
