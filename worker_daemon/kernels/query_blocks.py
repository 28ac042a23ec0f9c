"""Divides the prompts of a step into blocks of query tokens, on the device, so that
decode_schedule.py can cut the keys of each block as it cuts those of a decode: a short chunk after
a long context would else have fewer programs than the device has SMs, each with all keys.

Letters: N tokens, B sequences, Q query tokens of a block.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.kernels.attention_tiles import STEP_TENSORS
from worker_daemon.kernels.compile_ahead import launched

_BLOCKS = 128
"""Blocks that a program of the kernel writes."""


class BlockDivision(NamedTuple):
    """Inputs of a division beside the lengths."""

    queries: int
    """Q."""
    fewest_queries: int
    """Sequences with fewer query tokens are left out."""


def num_query_blocks(num_tokens: int, num_seqs: int, queries: int) -> int:
    """Return the blocks of Q = `queries` tokens that a step may have, one for padding included.

    Sequence s owns the blocks from query_start_loc[s] // Q + s on, which are at least as many as it
    needs. So the host knows their number without the lengths.
    """
    return num_tokens // queries + num_seqs + 1


def divide_queries(
    batch: AttentionMetadata, num_tokens: int, division: BlockDivision
) -> AttentionMetadata:
    """Return a batch whose sequences are the blocks of this one's: up to Q consecutive tokens of
    one sequence, with the keys that they see. Those without tokens have no query; those of
    sequences that are left out have -1 keys. The last ones of the batch come first.

    Made once for all layers of a step with this division (AttentionMetadata.divisions).
    """
    blocks = batch.divisions.get(division)
    if isinstance(blocks, AttentionMetadata):
        return blocks
    num_blocks = num_query_blocks(num_tokens, batch.num_seqs, division.queries)
    shape = (4, num_blocks + 1)
    columns = torch.empty(shape, dtype=torch.int32, device=batch.seq_lens.device)
    _block_kernel[(triton.cdiv(num_blocks + 1, _BLOCKS),)](
        columns,
        batch.query_start_loc,
        batch.seq_rows,
        batch.seq_lens,
        batch.num_seqs,
        num_blocks,
        batch.num_seqs.bit_length(),
        *division,
        BLOCKS=_BLOCKS,
    )
    starts, rows, lens, order = columns.unbind(0)
    blocks = replace(
        batch,
        query_start_loc=starts,
        seq_rows=rows[:-1],
        seq_lens=lens[:-1],
        seq_order=order[:-1],
        num_seqs=num_blocks,
        max_query_len=division.queries,
    )
    batch.divisions[division] = blocks
    return blocks


@triton.jit
def find_sequence(query_start_loc, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the largest s in 0 .. num_seqs whose first block is <= q_block; num_seqs means
    padding."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high + 1) // 2
        starts_here = tl.load(query_start_loc + middle) // BLOCK_Q + middle <= q_block
        low = tl.where(starts_here, middle, low)
        high = tl.where(starts_here, high, middle - 1)
    return low


@launched
@triton.jit(
    do_not_specialize=("num_seqs", "num_blocks", "num_halvings", "queries", "fewest_queries"),
    do_not_specialize_on_alignment=STEP_TENSORS[1:],
)
def _block_kernel(
    columns,
    query_start_loc,
    seq_rows,
    seq_lens,
    num_seqs,
    num_blocks,
    num_halvings,
    queries,
    fewest_queries,
    BLOCKS: tl.constexpr,
):
    """Write the columns of divide_queries: the blocks' first tokens, block table rows, keys and
    order. num_halvings: of the search among num_seqs sequences."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    low = block * 0
    high = low + num_seqs
    for _ in range(num_halvings):  # find_sequence, for all blocks
        middle = (low + high + 1) // 2
        starts_here = tl.load(query_start_loc + middle) // queries + middle <= block
        low = tl.where(starts_here, middle, low)
        high = tl.where(starts_here, high, tl.maximum(middle - 1, low))
    is_seq = low < num_seqs
    seq_start = tl.load(query_start_loc + low)
    seq_stop = tl.load(query_start_loc + tl.minimum(low + 1, num_seqs))
    first = (block - seq_start // queries - low) * queries
    start = tl.minimum(seq_start + first, seq_stop)
    stop = tl.minimum(start + queries, seq_stop)
    table_row = tl.load(seq_rows + low, mask=is_seq, other=0)
    num_keys = tl.load(seq_lens + low, mask=is_seq, other=0) - (seq_stop - stop)
    num_keys = tl.where(seq_stop - seq_start < fewest_queries, -1, tl.maximum(num_keys, 0))
    width = num_blocks + 1
    tl.store(columns + block, start, mask=block < width)
    tl.store(columns + width + block, table_row, mask=block < width)
    tl.store(columns + 2 * width + block, num_keys, mask=block < width)
    tl.store(columns + 3 * width + block, num_blocks - 1 - block, mask=block < width)
