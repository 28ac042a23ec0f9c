"""Penalties on tokens that a request already has, in one pass over the logits; and the token counts
that they use. The results equal those of worker_daemon/sample/penalties.py, bit for bit.

Letters: S request rows, R rows that sample, V vocabulary.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables
from worker_daemon.kernels.compile_ahead import launched

BLOCK = 2048
_COUNT_BLOCK = 128
_DRAFT_BLOCK = 32
"""The most drafts before a sample, rounded up to a power of two."""
_MOST = tl.constexpr(2**15 - 1)


def penalized(
    logits: torch.Tensor,
    slots: torch.Tensor,
    tables: PenaltyTables,
    drafts: DraftsBefore | None = None,
) -> torch.Tensor:
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
    if drafts is not None:
        assert drafts.most <= _DRAFT_BLOCK
        _penalize_drafts_kernel[(num_rows,)](
            result,
            logits,
            slots,
            tables.seen,
            tables.weights,
            drafts.num_before,
            drafts.inputs,
            vocab_size,
            logits.stride(0),
            BLOCK=_DRAFT_BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return result


def count_tokens(
    slots: torch.Tensor, token_ids: torch.Tensor, tables: PenaltyTables, most: int = 1
) -> None:
    """See Sampling.count_tokens."""
    num_rows = slots.shape[0]
    _count_kernel[(triton.cdiv(num_rows, _COUNT_BLOCK),)](
        tables.seen, slots, token_ids, num_rows, most, tables.seen.shape[1], BLOCK=_COUNT_BLOCK
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
    score = _penalized(score, entry != 0, entry & _MOST, presence, frequency, repetition)
    tl.store(result + place * vocab_size + column, score, mask=inside)


@launched
@triton.jit
def _penalize_drafts_kernel(
    result,
    logits,
    slots,
    seen,
    weights,
    num_before,
    inputs,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Penalizes the tokens again that are among a sample's drafts."""
    sample = tl.program_id(0)
    back = tl.arange(0, BLOCK)
    is_draft = back < tl.load(num_before + sample)
    token = tl.load(inputs + sample - back, mask=is_draft, other=-1)
    slot = tl.load(slots + sample).to(tl.int64)
    presence = tl.load(weights + slot * 3)
    frequency = tl.load(weights + slot * 3 + 1)
    repetition = tl.load(weights + slot * 3 + 2)
    place = sample.to(tl.int64)
    score = tl.load(logits + place * row_stride + token, mask=is_draft, other=0.0).to(tl.float32)
    entry = tl.load(seen + slot * vocab_size + token, mask=is_draft, other=0).to(tl.int32)
    among = tl.sum((token[:, None] == token[None, :]).to(tl.int32), axis=1)
    count = tl.minimum((entry & _MOST) + among, _MOST)
    score = _penalized(score, is_draft, count, presence, frequency, repetition)
    # Equal tokens write equal scores.
    tl.store(result + place * vocab_size + token, score, mask=is_draft)


@triton.jit
def _penalized(score, is_seen, count, presence, frequency, repetition):
    repeated = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    score = tl.where(is_seen, repeated, score)
    score = score - frequency * count.to(tl.float32)
    return score - tl.where(count > 0, presence, 0.0)


@launched
@triton.jit(do_not_specialize=["num_rows", "most"])
def _count_kernel(seen, slots, token_ids, num_rows, most, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(token_ids + row, mask=row < num_rows, other=-1)
    is_token = token >= 0
    slot = tl.load(slots + row, mask=is_token, other=0)
    # Of equal tokens of a row, the first one is counted for all of them.
    more = is_token.to(tl.int32)
    num_earlier = tl.zeros_like(more)
    for distance in range(1, most):
        earlier, later = row - distance, row + distance
        inside = is_token & (earlier >= 0)
        is_equal = tl.load(token_ids + earlier, mask=inside, other=-1) == token
        is_equal &= tl.load(slots + earlier, mask=inside, other=-1) == slot
        num_earlier += is_equal.to(tl.int32)
        inside = is_token & (later < num_rows)
        is_equal = tl.load(token_ids + later, mask=inside, other=-1) == token
        is_equal &= tl.load(slots + later, mask=inside, other=-1) == slot
        more += is_equal.to(tl.int32)
    place = seen + slot.to(tl.int64) * vocab_size + token
    is_counted = is_token & (num_earlier == 0)
    entry = tl.load(place, mask=is_counted, other=0).to(tl.int32)
    more = tl.minimum(more, _MOST - (entry & _MOST))
    tl.store(place, (entry + more).to(tl.int16), mask=is_counted & (more > 0))
