"""Penalties on tokens that a request already has, in one pass over the logits; and the token counts
that they use. The results equal those of worker_daemon/sample/penalties.py, bit for bit.

Letters: S request rows, R rows that sample, V vocabulary.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.sampling import PenaltyTables
from worker_daemon.kernels.compile_ahead import launched

BLOCK = 2048
_COUNT_BLOCK = 128
_MOST = tl.constexpr(2**15 - 1)


def penalized(logits: torch.Tensor, slots: torch.Tensor, tables: PenaltyTables) -> torch.Tensor:
    """Return float32 [R, V]; see Sampling.penalized."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    result = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    _penalize_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        result,
        logits,
        slots,
        tables.seen,
        tables.weights,
        vocab_size,
        logits.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
        # The product and the sum are each rounded, as in torch.
        enable_fp_fusion=False,
    )
    return result


def count_tokens(slots: torch.Tensor, token_ids: torch.Tensor, tables: PenaltyTables) -> None:
    """See Sampling.count_tokens."""
    num_rows = slots.shape[0]
    _count_kernel[(triton.cdiv(num_rows, _COUNT_BLOCK),)](
        tables.seen, slots, token_ids, num_rows, tables.seen.shape[1], BLOCK=_COUNT_BLOCK
    )


@launched
@triton.jit
def _penalize_kernel(
    result, logits, slots, seen, weights, vocab_size, row_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab_size
    slot = tl.load(slots + row).to(tl.int64)
    presence = tl.load(weights + slot * 3)
    frequency = tl.load(weights + slot * 3 + 1)
    repetition = tl.load(weights + slot * 3 + 2)
    place = row.to(tl.int64)
    score = tl.load(logits + place * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    entry = tl.load(seen + slot * vocab_size + column, mask=inside, other=0).to(tl.int32)
    count = (entry & _MOST).to(tl.float32)
    repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    score = tl.where(entry != 0, repeated, score)
    score = score - frequency * count
    score = score - tl.where(count > 0, presence, 0.0)
    tl.store(result + place * vocab_size + column, score, mask=inside)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(seen, slots, token_ids, num_rows, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < num_rows, other=-1)
    is_token = token >= 0
    slot = tl.load(slots + row, mask=is_token, other=0).to(tl.int64)
    place = seen + slot * vocab_size + token
    entry = tl.load(place, mask=is_token, other=0)
    is_counted = is_token & ((entry.to(tl.int32) & _MOST) < _MOST)
    tl.store(place, (entry.to(tl.int32) + 1).to(tl.int16), mask=is_counted)
