"""The start and end of a step on the device: it reads its columns from host memory, and writes its
tokens to host memory.

Both areas of host memory are rings of slots. The device counts which slot a step uses, so that one
captured graph serves all steps.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched

_QUADS = 1024
"""Groups of four int32 values: 256 threads read them with loads of 16 bytes."""
_TOKENS = 256


def take_columns(
    columns: torch.Tensor,
    ring: torch.Tensor,
    turn: torch.Tensor,
    num_taken: torch.Tensor,
    size: int,
) -> None:
    """Copy ring[turn % depth, :size] to columns[:size], then set turn and num_taken to turn + 1.

    columns int32 [capacity] on the device; ring int32 [depth, capacity] and num_taken int64 [1] in
    page-locked host memory; turn int64 [1] on the device. size and capacity are multiples of 4.
    """
    assert size % 4 == 0 and ring.shape[1] % 4 == 0, "columns are aligned to 16 bytes"
    _take_columns_kernel[(1,)](
        columns,
        ring,
        turn,
        num_taken,
        size // 4,
        ring.shape[1] // 4,
        DEPTH=ring.shape[0],
        BLOCK=_QUADS,
        num_warps=8,
    )


def store_tokens(
    last_sampled: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    ring: torch.Tensor,
    turn: torch.Tensor,
) -> None:
    """Copy token_ids to last_sampled[rows] and to ring[(turn - 1) % depth, :R].

    last_sampled int64 [S], of any stride, rows int32 [R], token_ids int64 [R], turn int64 [1]: on
    the device; ring int64 [depth, width >= R] in page-locked host memory.
    """
    num_rows = rows.shape[0]
    _store_tokens_kernel[(triton.cdiv(num_rows, _TOKENS),)](
        last_sampled,
        rows,
        token_ids,
        ring,
        turn,
        num_rows,
        ring.shape[1],
        last_sampled.stride(0),
        DEPTH=ring.shape[0],
        BLOCK=_TOKENS,
    )


def store_counts(counts: torch.Tensor, ring: torch.Tensor, turn: torch.Tensor) -> None:
    """Copy counts int32 [Q] to ring[(turn - 1) % depth, :Q]: int32 [depth, width >= Q] in
    page-locked host memory. turn: as for store_tokens."""
    num_seqs = counts.shape[0]
    _store_counts_kernel[(triton.cdiv(num_seqs, _TOKENS),)](
        counts, ring, turn, num_seqs, ring.shape[1], DEPTH=ring.shape[0], BLOCK=_TOKENS
    )


@launched
@triton.jit(do_not_specialize=["num_quads", "quads_a_slot"])
def _take_columns_kernel(
    columns,
    ring,
    turn,
    num_taken,
    num_quads,
    quads_a_slot,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy in one program: all loads complete before a thread counts the turn."""
    now = tl.load(turn)
    source = ring + (now % DEPTH) * quads_a_slot * 4
    for start in range(0, num_quads * 4, BLOCK * 4):
        here = start + tl.arange(0, BLOCK * 4)
        inside = here < num_quads * 4
        tl.store(columns + here, tl.load(source + here, mask=inside, other=0), mask=inside)
    tl.debug_barrier()
    tl.store(turn, now + 1)
    tl.store(num_taken, now + 1)


@launched
@triton.jit(
    do_not_specialize=["num_rows", "width", "row_width"],
    do_not_specialize_on_alignment=["rows", "token_ids"],
)
def _store_tokens_kernel(
    last_sampled,
    rows,
    token_ids,
    ring,
    turn,
    num_rows,
    width,
    row_width,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_rows
    row = tl.load(rows + index, mask=inside, other=0)
    token = tl.load(token_ids + index, mask=inside, other=0)
    tl.store(last_sampled + row * row_width, token, mask=inside)
    slot = ring + ((tl.load(turn) - 1) % DEPTH) * width
    tl.store(slot + index, token, mask=inside)


@launched
@triton.jit(
    do_not_specialize=["num_seqs", "width"],
    do_not_specialize_on_alignment=["counts"],
)
def _store_counts_kernel(
    counts, ring, turn, num_seqs, width, DEPTH: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_seqs
    slot = ring + ((tl.load(turn) - 1) % DEPTH) * width
    tl.store(slot + index, tl.load(counts + index, mask=inside, other=0), mask=inside)
