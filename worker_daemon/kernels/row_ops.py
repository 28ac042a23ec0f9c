"""Applies a step's changes to the request rows on the device, and gathers its tokens from them.

The host has checked rows, positions and block ids.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.drafts import Verified
from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.kernels.compile_ahead import launched

_BLOCK = 128


class TritonRowKernels:
    """One launch per method; stateless. RowKernels (runner/row_tables.py) defines shapes and
    meaning."""

    def update_blocks(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor,
        indices: torch.Tensor,
        block_ids: torch.Tensor,
    ) -> None:
        """Set block_table[rows, indices] = block_ids: int32 [S, max_blocks]; int32 [U] each."""
        num_updates = rows.shape[0]
        _update_blocks_kernel[(triton.cdiv(num_updates, _BLOCK),)](
            block_table, rows, indices, block_ids, num_updates, block_table.stride(0), BLOCK=_BLOCK
        )

    def gather_tokens(
        self,
        host_token_ids: torch.Tensor,
        token_rows: torch.Tensor,
        positions: torch.Tensor,
        next_tokens: torch.Tensor,
        block_table: torch.Tensor,
        block_size: int,
        texts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token_ids, slot_mapping), int64 [N] each, for int32 columns [N] and next_tokens
        int64 [S + 1, 1 + K]. A missing sampled token (-1) is read as 0. texts: int32 [S + 1, W]."""
        num_tokens = host_token_ids.shape[0]
        token_ids = torch.empty(num_tokens, dtype=torch.int64, device=host_token_ids.device)
        slot_mapping = torch.empty_like(token_ids)
        _gather_tokens_kernel[(triton.cdiv(num_tokens, _BLOCK),)](
            token_ids,
            slot_mapping,
            host_token_ids,
            token_rows,
            positions,
            next_tokens,
            block_table,
            block_table if texts is None else texts,
            num_tokens,
            block_table.stride(0),
            next_tokens.stride(0),
            0 if texts is None else texts.stride(0),
            HAS_TEXTS=texts is not None,
            BLOCK_SIZE=block_size,
            BLOCK=_BLOCK,
        )
        return token_ids, slot_mapping

    def correct_lengths(
        self,
        seq_lens: torch.Tensor,
        seq_rows: torch.Tensor,
        corrections: torch.Tensor,
        refused: torch.Tensor,
        shift: torch.Tensor,
    ) -> None:
        """Columns int32 [B]; tables int32 [S + 1]."""
        num_seqs = seq_rows.shape[0]
        _correct_lengths_kernel[(triton.cdiv(num_seqs, _BLOCK),)](
            seq_lens, seq_rows, corrections, refused, shift, num_seqs, BLOCK=_BLOCK
        )

    def correct_positions(
        self, positions: torch.Tensor, rows: torch.Tensor, shift: torch.Tensor
    ) -> None:
        """Columns int32 [N]; shift int32 [S + 1]."""
        count = rows.shape[0]
        _correct_positions_kernel[(triton.cdiv(count, _BLOCK),)](
            positions, rows, shift, count, BLOCK=_BLOCK
        )

    def verify(
        self,
        token_ids: torch.Tensor,
        inputs: torch.Tensor,
        firsts: torch.Tensor,
        num_seqs: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        next_tokens: torch.Tensor,
        refused: torch.Tensor,
    ) -> Verified:
        """token_ids, inputs int64 [R]; firsts int32 [Q + 1]; num_seqs int32 [1]; rows, positions
        int32 [R]; next_tokens int64 [S + 1, 1 + K]; refused int32 [S + 1]."""
        padded, width = firsts.shape[0] - 1, next_tokens.shape[1]
        gained = token_ids.new_empty((padded, width))
        own_rows, counts, lengths, own, total = refused.new_empty((5, padded))
        kept = torch.empty_like(token_ids)
        _verify_kernel[(padded,)](
            own_rows, gained, counts, lengths, own, total, kept,
            token_ids, inputs, firsts, num_seqs, rows, positions, next_tokens, refused,
            width,
            next_tokens.shape[0] - 1,
            BLOCK=triton.next_power_of_2(width),
            MISSING=NO_TOKEN,
            num_warps=1,
        )  # fmt: skip
        return Verified(own_rows, gained, counts, lengths, own, total, kept)


@launched
@triton.jit(do_not_specialize=["num_updates", "table_stride"])
def _update_blocks_kernel(
    block_table, rows, indices, block_ids, num_updates, table_stride, BLOCK: tl.constexpr
):
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = update < num_updates
    row = tl.load(rows + update, mask=inside, other=0).to(tl.int64)
    index = tl.load(indices + update, mask=inside, other=0)
    block_id = tl.load(block_ids + update, mask=inside, other=0)
    tl.store(block_table + row * table_stride + index, block_id, mask=inside)


@launched
@triton.jit(
    do_not_specialize=["num_tokens", "table_stride", "row_width", "text_width"],
    do_not_specialize_on_alignment=["token_ids", "slot_mapping"],
)
def _gather_tokens_kernel(
    token_ids,
    slot_mapping,
    host_token_ids,
    token_rows,
    positions,
    next_tokens,
    block_table,
    texts,
    num_tokens,
    table_stride,
    row_width,
    text_width,
    HAS_TEXTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    row = tl.load(token_rows + token, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=inside, other=0)
    from_host = tl.load(host_token_ids + token, mask=inside, other=0)
    entry = next_tokens + row * row_width - 1 - from_host
    sampled = tl.load(entry, mask=inside & (from_host < 0), other=0)
    found = tl.where(from_host < 0, tl.maximum(sampled, 0), from_host)
    tl.store(token_ids + token, found, mask=inside)
    if HAS_TEXTS:
        tl.store(texts + row * text_width + position, found.to(tl.int32), mask=inside)
    entry = block_table + row * table_stride + position // BLOCK_SIZE
    block_id = tl.load(entry, mask=inside, other=0).to(tl.int64)
    tl.store(slot_mapping + token, block_id * BLOCK_SIZE + position % BLOCK_SIZE, mask=inside)


@launched
@triton.jit(do_not_specialize=["num_seqs"])
def _correct_lengths_kernel(
    seq_lens, seq_rows, corrections, refused, shift, num_seqs, BLOCK: tl.constexpr
):
    # Padding names the spare row repeatedly, with equal values.
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    row = tl.load(seq_rows + seq, mask=inside, other=0).to(tl.int64)
    correction = tl.load(corrections + seq, mask=inside, other=0)
    own = tl.where(correction < 0, 0, tl.load(refused + row, mask=inside, other=0))
    by = tl.maximum(correction, 0) - own
    tl.store(refused + row, own, mask=inside)
    tl.store(shift + row, by, mask=inside)
    tl.store(seq_lens + seq, tl.load(seq_lens + seq, mask=inside, other=0) + by, mask=inside)


@launched
@triton.jit(do_not_specialize=["count"])
def _correct_positions_kernel(positions, rows, shift, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(rows + index, mask=inside, other=0).to(tl.int64)
    by = tl.load(shift + row, mask=inside, other=0)
    place = positions + index
    tl.store(place, tl.load(place, mask=inside, other=0) + by, mask=inside)


@launched
@triton.jit(
    do_not_specialize=["width", "spare"],
    do_not_specialize_on_alignment=[
        "own_rows", "counts", "lengths", "own", "total", "token_ids", "inputs", "num_seqs", "rows",
        "positions",
    ],
)  # fmt: skip
def _verify_kernel(
    own_rows,
    gained,
    counts,
    lengths,
    own,
    total,
    kept,
    token_ids,
    inputs,
    firsts,
    num_seqs,
    rows,
    positions,
    next_tokens,
    refused,
    width,
    spare,
    BLOCK: tl.constexpr,
    MISSING: tl.constexpr,
):
    """Padding reads no sample, and changes no row."""
    seq = tl.program_id(0)
    is_there = seq < tl.load(num_seqs)
    first = tl.load(firsts + seq)
    num_samples = tl.where(is_there, tl.load(firsts + seq + 1) - first, 0)
    place = tl.arange(0, BLOCK)
    inside = place < num_samples
    sampled = tl.load(token_ids + first + place, mask=inside, other=MISSING)
    follows = place + 1 < num_samples
    draft = tl.load(inputs + first + place + 1, mask=follows, other=MISSING)
    following = tl.load(token_ids + first + place + 1, mask=follows, other=MISSING)
    is_last = (sampled != draft) | (following == MISSING)
    accepted = tl.min(tl.where(is_last, place, BLOCK), axis=0)
    is_gained = place <= accepted
    row = tl.load(rows + first, mask=is_there, other=spare).to(tl.int64)
    token = tl.where(is_gained, sampled, MISSING)
    tl.store(gained + seq.to(tl.int64) * width + place, token, mask=place < width)
    tl.store(kept + first + place, token, mask=inside)
    newest = tl.max(tl.where(place == accepted, sampled, MISSING))
    tl.store(next_tokens + row * width, newest, mask=is_there)
    num_gained = tl.where(is_there, accepted + 1, 0)
    refusals = num_samples - num_gained
    before = tl.load(refused + row)
    tl.store(refused + row, before + refusals, mask=is_there)
    tl.store(own_rows + seq, row.to(tl.int32))
    tl.store(counts + seq, num_gained)
    position = tl.load(positions + first, mask=is_there, other=0)
    tl.store(lengths + seq, position + num_gained)
    tl.store(own + seq, refusals)
    tl.store(total + seq, before + refusals)
