"""Divides the decodes of a step into items of work by their keys, on the device.

Sequences are cut into pieces of at most one length, chosen so that all programs of a launch get
about as many keys; the device starts the items in order, the longest sequence's first. As the
split-KV schedules of FlashInfer (Ye et al., arXiv 2501.01005) and Stream-K (Osama et al., arXiv
2301.03598), but made within the step, so a CUDA graph serves every set of lengths.

Letters: B sequences, S programs that run at once for each KV head.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.kernels.attention_tiles import STEP_TENSORS
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options
from worker_daemon.kernels.tiles import (
    MAX_SPLITS,
    MIN_BLOCK_PIECE_KEYS,
    MIN_DOT_ROWS,
    MIN_KEYS_PER_SPLIT,
    DeviceLimits,
    Tile,
    most_extra_pieces,
    next_power_of_two,
)

_ITEM = tl.constexpr(9)
"""int32 of an item, before its counters."""

_ITEMS = 16
"""Items that a program of the kernel places."""

_LEAST_ROWS = 1024
"""Sequences of a program's vectors: one kernel serves all batches of up to as many."""

_ALL_KEYS = 2**30


class Cutting(NamedTuple):
    """Bounds of a launch's items: the inputs of a schedule beside the lengths."""

    num_kv_heads: int
    slots: int
    """S: items that run at once for each KV head, for lengths that are equal."""
    extra: int
    """Items beyond one for each sequence that a schedule may have, at least S."""
    min_even: int
    """Keys of a piece, at least."""
    min_piece: int
    """Keys of a piece, at least, where sequences are cut because their lengths differ."""
    most_queries: int
    """Sequences with more query tokens are left out."""
    most_keys: int
    """The last keys of a sequence that its queries see."""

    @classmethod
    def of(
        cls,
        num_seqs: int,
        longest: int,
        num_kv_heads: int,
        slots: int,
        queries: int,
        window: int | None,
        tile: Tile,
        min_piece: int,
        limits: DeviceLimits,
    ) -> "Cutting":
        """Return that of num_seqs sequences, each with up to `queries` queries, which see up to
        `longest` keys."""
        most = min(
            most_extra_pieces(num_kv_heads, queries, limits), num_seqs * longest // min_piece
        )
        extra = max(slots, most)
        most_keys = _ALL_KEYS if window is None else window + queries - 1
        least = MIN_KEYS_PER_SPLIT if tile.block_m <= MIN_DOT_ROWS else MIN_BLOCK_PIECE_KEYS
        min_even = max(tile.block_n, least)
        return cls(num_kv_heads, slots, extra, min_even, min_piece, queries, most_keys)


class Schedule(NamedTuple):
    """A step's items, on the device."""

    entries: torch.Tensor
    """int32 [num_items + 1, 9 + Hkv], a row for each item: the first token of its sequence, the
    next sequence's, the row of the block table, the keys; its piece, the pieces of the sequence,
    the first partial result of these; and its place among the rows without work, which come last,
    below 0 for others. In row p, the item whose first partial result is p, or -1. Then the counters
    of the sequence's pieces that are done, one for each KV head, in the row of its first piece: 0
    between launches. The last row never has work."""
    num_items: int
    """Items, at most: the grid of a launch."""
    num_partial: int
    """Pieces of sequences with several, at most."""


def schedule_decodes(batch: AttentionMetadata, cutting: Cutting, pdl: bool) -> Schedule:
    """Return the items of the sequences of a step that have 1 .. most_queries query tokens, but not
    -1 keys; an item's piece counts in equal parts of its sequence's keys.

    Made once for all layers of a step with this cutting (AttentionMetadata.divisions). The kernels
    of these may read it before they wait for the previous ones: it never lets the next kernel start
    early (see launch.py).
    """
    num_items = batch.num_seqs + cutting.extra
    entries = batch.divisions.get(cutting)
    if not isinstance(entries, torch.Tensor):
        shape = (num_items + 1, _ITEM.value + cutting.num_kv_heads)
        entries = torch.empty(shape, dtype=torch.int32, device=batch.seq_lens.device)
        batch.divisions[cutting] = entries
        _schedule_kernel[(triton.cdiv(shape[0], _ITEMS),)](
            entries,
            batch.query_start_loc,
            batch.seq_rows,
            batch.seq_lens,
            batch.seq_order,
            batch.num_seqs,
            shape[0],
            *cutting,
            MOST_SPLITS=MAX_SPLITS,
            ITEMS=_ITEMS,
            ROWS=max(_LEAST_ROWS, next_power_of_two(batch.num_seqs)),
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )
    return Schedule(entries, num_items, cutting.extra + min(cutting.extra, batch.num_seqs))


@triton.jit
def _choose_piece(
    keys,
    has_queries,
    slots,
    extra,
    min_even,
    min_piece,
    MOST_SPLITS: tl.constexpr,
):
    """Return the most keys of a piece, for sequences of `keys`.

    Either the longest sequence is cut into as many pieces as give each of the slots one, and the
    others into pieces as long; or, if a slot's share of all keys is much less than that, all are
    cut into `extra` pieces together. The device balances these, as each slot takes several. A
    program that is alone on its SM reads about 30 GB/s, nearly all SMs' share of 4.5 TB/s: so a
    piece of up to 1.5 shares does not last longer than the launch."""
    num_seqs = tl.maximum(tl.sum(has_queries.to(tl.int32), 0), 1)
    total = tl.sum(keys.to(tl.int64), 0)
    longest = tl.max(keys, 0)
    even = tl.minimum(tl.minimum(slots // num_seqs, longest // min_even), MOST_SPLITS)
    piece = tl.cdiv(longest, tl.maximum(even, 1))
    fine = tl.maximum(tl.cdiv(total, extra), min_piece).to(tl.int32)
    is_uneven = 2 * slots * piece.to(tl.int64) > 3 * total
    return tl.maximum(tl.where(is_uneven, tl.minimum(piece, fine), piece), 1)


@launched
@triton.jit(
    do_not_specialize=(
        *("num_seqs", "num_rows", "num_kv_heads", "slots", "extra", "min_even", "min_piece"),
        *("most_queries", "most_keys"),
    ),
    do_not_specialize_on_alignment=STEP_TENSORS[1:],
)
def _schedule_kernel(
    entries,
    query_start_loc,
    seq_rows,
    seq_lens,
    seq_order,
    num_seqs,
    num_rows,
    num_kv_heads,
    slots,
    extra,
    min_even,
    min_piece,
    most_queries,
    most_keys,
    MOST_SPLITS: tl.constexpr,
    ITEMS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write ITEMS rows per program. Each computes all sums itself: a few microseconds, once a step.
    See Schedule for the entries."""
    row = tl.arange(0, ROWS)
    is_seq = row < num_seqs
    seq = tl.load(seq_order + row, mask=is_seq, other=0)
    token = tl.load(query_start_loc + seq, mask=is_seq, other=0)
    num_queries = tl.load(query_start_loc + seq + 1, mask=is_seq, other=0) - token
    has_queries = (num_queries > 0) & (num_queries <= most_queries)
    keys = tl.minimum(tl.load(seq_lens + seq, mask=has_queries, other=0), most_keys).to(tl.int32)
    has_queries &= keys >= 0
    keys = tl.maximum(keys, 0)
    piece = _choose_piece(keys, has_queries, slots, extra, min_even, min_piece, MOST_SPLITS)
    pieces = tl.where(has_queries, tl.maximum(tl.cdiv(keys, piece), 1), 0)
    ends = tl.cumsum(pieces, 0)
    partial_ends = tl.cumsum(tl.where(pieces > 1, pieces, 0), 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    count = tl.sum(pieces, 0)
    is_item = item < count
    is_before = ends[None, :] <= item[:, None]
    own_row = tl.sum(is_before.to(tl.int32), 1)
    first = tl.max(tl.where(is_before, ends[None, :], 0), 1)
    partial = tl.max(tl.where(is_before, partial_ends[None, :], 0), 1)
    is_own = row[None, :] == own_row[:, None]
    starts_there = (pieces > 1)[None, :] & ((partial_ends - pieces)[None, :] == item[:, None])
    starting = tl.max(tl.where(starts_there, (ends - pieces)[None, :], -1), 1)
    own_pieces = tl.sum(tl.where(is_own, pieces[None, :], 0), 1)
    own_seq = tl.load(seq_order + own_row, mask=is_item, other=num_seqs)
    own_token = tl.load(query_start_loc + own_seq)
    next_token = tl.load(query_start_loc + tl.minimum(own_seq + 1, num_seqs))
    table_row = tl.load(seq_rows + own_seq, mask=is_item, other=0)
    num_keys = tl.load(seq_lens + own_seq, mask=is_item, other=0)

    # Layers of the step before may still read the entries.
    await_previous(PDL)
    is_row = item < num_rows
    width = _ITEM + num_kv_heads
    place = entries + item * width
    tl.store(place, own_token, mask=is_row)
    tl.store(place + 1, next_token, mask=is_row)
    tl.store(place + 2, table_row, mask=is_row)
    tl.store(place + 3, num_keys, mask=is_row)
    tl.store(place + 4, tl.where(is_item, item - first, 0), mask=is_row)
    tl.store(place + 5, tl.where(is_item, own_pieces, 1), mask=is_row)
    tl.store(place + 6, partial, mask=is_row)
    tl.store(place + 7, item - count, mask=is_row)
    tl.store(place + 8, starting, mask=is_row)
    for kv_head in range(num_kv_heads):
        tl.store(place + _ITEM + kv_head, item * 0, mask=is_row)


@triton.jit
def load_item(entries, item, num_items, NUM_KV_HEADS: tl.constexpr):
    """Return an item's sequence: its first token, the next one's, its block table row and its keys;
    the piece, how many there are, their first partial result; and the place among those without
    work, below 0 if it has some. num_items: see Schedule; later items have no work either."""
    row = tl.minimum(item, num_items)
    entry = entries + row * (_ITEM + NUM_KV_HEADS)
    token, next_token = tl.load(entry), tl.load(entry + 1)
    table_row, num_keys = tl.load(entry + 2), tl.load(entry + 3)
    piece, pieces, partial = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    idle = tl.load(entry + 7) + (item - row)
    return token, next_token, table_row, num_keys, piece, pieces, partial, idle


@triton.jit
def find_cut(entries, partial, NUM_KV_HEADS: tl.constexpr):
    """Return the item whose sequence's first partial result is `partial`, or -1."""
    return tl.load(entries + partial * (_ITEM + NUM_KV_HEADS) + 8)


@triton.jit
def is_last_piece(entries, first_item, kv_head, pieces, NUM_KV_HEADS: tl.constexpr):
    """Count this program's piece as done, and return whether all are: then their partial results
    can be read past L1, and the counter is 0 again. first_item: of the first piece."""
    counter = entries + first_item * (_ITEM + NUM_KV_HEADS) + _ITEM + kv_head
    # All threads write their results before the count, and read other programs' after it.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter, 0)
    return is_last
