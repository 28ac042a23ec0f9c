"""Describes the request rows to a driver that adopts them. Reads host state and the device's block
table; changes nothing.

A row's tokens are those of its admission and, on the output rank, those sampled since then that
have reached the host. rpc_schema/adoption.py bounds the size of a reply.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from rpc_schema.adoption import (
    MAX_PAGE_BYTES,
    MAX_ROW_BLOCKS,
    MAX_ROW_TOKENS,
    RequestRow,
    VersionSpan,
)
from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.runner.token_versions import RowEnd, TokenVersions

_ROW_BYTES = 128
"""Upper bound on a row's encoded size without its id, note, extensions, spans and columns."""
_SPAN_BYTES = 40
"""Upper bound on a span's encoded size."""


class Page(NamedTuple):
    """One reply's rows, by ascending slot."""

    rows: tuple[RequestRow, ...]
    next_slot: int
    """The first slot of the next reply; 0 if no row follows."""
    token_ids: bytes
    """int32 little-endian, all rows concatenated."""
    block_ids: bytes
    """int32 little-endian, the rows' block ids, concatenated."""


def describe_requests(
    state: RequestState,
    inputs: InputBuilder,
    history: TokenHistory,
    first_slot: int,
    weights_version: int,
    earlier: TokenVersions,
    recomputed: Mapping[int, RowEnd],
) -> Page:
    """Return rows from first_slot on: as many as fit into a reply, at least one. Waits for the
    device. weights_version: the present one; earlier: those before it; recomputed: by slot, rows
    whose KV was computed again in place, to their ends."""
    rows: list[RequestRow] = []
    tokens: list[Int32s] = []
    blocks: list[Int32s] = []
    size = 0
    for slot in np.flatnonzero(state.counts.live).tolist():
        if slot < first_slot:
            continue
        token_ids = _tokens(state, history, slot)[:MAX_ROW_TOKENS]
        by_group = _blocks(state, inputs, slot)
        spans = earlier.of(slot, int(state.generation[slot]))
        row = _row(state, slot, token_ids, by_group, weights_version, spans)
        end = recomputed.get(slot)
        if end is not None and end.generation == state.generation[slot]:
            row = msgspec.structs.replace(row, num_recomputed_tokens=end.end)
        block_ids = np.concatenate(by_group)
        size += _size(row) + token_ids.nbytes + block_ids.nbytes
        if rows and size > MAX_PAGE_BYTES:
            return Page(tuple(rows), slot, _joined(tokens), _joined(blocks))
        rows.append(row)
        tokens.append(token_ids)
        blocks.append(block_ids)
    return Page(tuple(rows), 0, _joined(tokens), _joined(blocks))


def _tokens(state: RequestState, history: TokenHistory, slot: int) -> Int32s:
    known = state.known_tokens[slot]
    end = history.known_to(slot, int(state.generation[slot]), known.size)
    return np.concatenate([known, history.between(slot, known.size, max(end, known.size))])


def _blocks(state: RequestState, inputs: InputBuilder, slot: int) -> list[Int32s]:
    """Return the row's blocks in each group, with the null block in place of those behind a window;
    none if there are too many to report, or if the row has a state without checkpoints: such a
    request is computed again. The state itself may be of a step that failed on another rank."""
    num_blocks: list[int] = state.counts.blocks_by_group[:, slot].tolist()
    limits = state.limits
    is_lost = limits.keeps_state and not limits.checkpoint_blocks
    if is_lost or sum(num_blocks) > MAX_ROW_BLOCKS:
        num_blocks = [0] * len(num_blocks)
    num_computed = int(state.counts.num_computed[slot])
    by_group = []
    for group, count, table in zip(
        limits.block_groups, num_blocks, inputs.tables.group_tables, strict=True
    ):
        block_ids: Int32s = table[slot, :count].cpu().numpy().copy()
        block_ids[: blocks_behind(num_computed, group)] = NULL_BLOCK
        by_group.append(block_ids)
    return by_group


def _row(
    state: RequestState,
    slot: int,
    tokens: Int32s,
    blocks: Sequence[Int32s],
    weights_version: int,
    earlier_versions: tuple[VersionSpan, ...],
) -> RequestRow:
    num_blocks = [own.size for own in blocks]
    return RequestRow(
        slot=slot,
        req_id=state.req_ids[slot],
        num_prompt_tokens=int(state.num_prompt_tokens[slot]),
        num_tokens=tokens.size,
        num_computed_tokens=int(state.counts.num_computed[slot]) if any(num_blocks) else 0,
        num_blocks=num_blocks[0],
        num_more_blocks=tuple(num_blocks[1:]),
        extensions=state.extensions[slot],
        note=state.notes[slot],
        weights_version=weights_version,
        earlier_versions=earlier_versions,
        num_admitted_tokens=int(state.num_known_tokens[slot]),
    )


def _size(row: RequestRow) -> int:
    extensions = len(msgspec.msgpack.encode(row.extensions))
    spans = _SPAN_BYTES * len(row.earlier_versions)
    return _ROW_BYTES + 4 * len(row.req_id) + len(row.note) + extensions + spans


def _joined(columns: list[Int32s]) -> bytes:
    return b"".join(column.astype("<i4", copy=False).tobytes() for column in columns)
