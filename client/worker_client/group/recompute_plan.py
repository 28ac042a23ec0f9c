"""Plans what the workers recompute: which positions of which rows, in which messages. Pure."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rpc_schema.adoption import MAX_ROW_TOKENS
from rpc_schema.extensions import extension_of
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_for
from rpc_schema.routed_experts import RoutedExpertsWanted
from rpc_schema.weight_transfer import MAX_RECOMPUTED_BYTES
from worker_client.group.adoption import RankRow
from worker_client.parts.registry import pools

Columns: TypeAlias = tuple[int, int, int, int]
"""A row of RecomputeRequests.rows."""


@dataclass(slots=True)
class RowsMessage:
    """A RecomputeRequests to be."""

    rows: list[Columns] = field(default_factory=list)
    token_ids: list[bytes] = field(default_factory=list)
    req_ids: list[str] = field(default_factory=list)
    """Requests whose KV is complete after it."""
    is_cut: bool = False
    """The last row goes on in the next message."""
    num_tokens: int = 0
    """Tokens to be computed."""
    size_bytes: int = 0
    """Size of token_ids."""


class RowsPlan:
    """Rows whose KV is to be computed again, and how far that has come. Each position of any block
    is computed once, and before another row reads it: rows come by ascending slot, and begin behind
    the full blocks that they share with rows before them."""

    def __init__(self, rows: Iterable[RankRow], groups: Sequence[BlockGroup]) -> None:
        self._rows = deque(sorted(rows, key=lambda row: row.row.slot))
        self._groups = groups
        self._computed: list[set[int]] = [set() for _ in groups]
        """The full blocks of each group that messages have computed."""
        self._reached: int | None = None
        """Position before which messages have computed the first row; None: it is not begun."""

    def take(self, waiting: Collection[str], most: int) -> RowsMessage:
        """Return the next message, of at most `most` tokens; no rows if nothing is left. waiting:
        the requests that still need it; others have lost their rows."""
        message = RowsMessage()
        while self._rows:
            row = self._rows[0]
            if row.row.req_id in waiting:
                goes_on = self._add(row, most, message)
                if message.is_cut or not goes_on:
                    break
            else:
                self._pass_row()
        return message

    def _add(self, row: RankRow, most: int, message: RowsMessage) -> bool:
        """Add a row, or as much of it as there is room for. Return False if the message is full.

        One token at the end of a row that was begun before is a message of its own: in a forward
        pass of single tokens, no row can read what another one stores (plan_passes in the daemon).
        """
        end, num_prompt = end_of(row), row.row.num_prompt_tokens
        is_begun = self._reached is not None
        first = self._first(row, end) if self._reached is None else self._reached
        stop = min(end, first + most - message.num_tokens)
        given = row.token_ids[num_prompt : max(num_prompt, stop)]
        if first < end:
            is_too_long = message.size_bytes + 4 * given.size > MAX_RECOMPUTED_BYTES
            if stop == first or (message.rows and is_too_long):
                return False
            message.rows.append((row.row.slot, first, stop, given.size))
            message.token_ids.append(given.astype("<i4").tobytes())
            message.size_bytes += 4 * given.size
            message.num_tokens += stop - first
        for own, group, there in zip(
            row.blocks_by_group, self._groups, self._computed, strict=True
        ):
            there.update(own[: stop // group.block_size].tolist())
        message.is_cut = stop < end
        if message.is_cut:
            self._reached = stop
            return False
        message.req_ids.append(row.row.req_id)
        self._pass_row()
        return not (is_begun and stop - first == 1)

    def _pass_row(self) -> None:
        self._rows.popleft()
        self._reached = None

    def _first(self, row: RankRow, end: int) -> int:
        """Return the first position that is not in full blocks which were computed before."""
        first = end
        for own, group, there in zip(
            row.blocks_by_group, self._groups, self._computed, strict=True
        ):
            full = own[: end // group.block_size].tolist()
            num_shared = next((i for i, each in enumerate(full) if each not in there), len(full))
            first = min(first, num_shared * group.block_size)
        return first


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
    end = end_of(row)
    return end > 0 and all(
        len(own) >= blocks_for(end, group.block_size)
        and (own[: blocks_for(end, group.block_size)] != NULL_BLOCK).all()
        for own, group in zip(row.blocks_by_group, groups, strict=True)
    )


def end_of(row: RankRow) -> int:
    """Return the position behind the row's last computed token. Where tokens may be refused, the
    row's count is an upper bound; a failed request has a last token of NO_TOKEN."""
    known = row.token_ids.size
    if known and row.token_ids[-1] < 0:
        known -= 1
    return min(row.row.num_computed_tokens, known)
