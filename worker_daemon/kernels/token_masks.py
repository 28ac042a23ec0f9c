"""Applies masks of allowed tokens, 32 tokens per word, to rows of logits.

Letters: R rows, V vocabulary, M masks, W words of a mask.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched

BLOCK = 4096
"""Logits of a row that a program reads."""


def masked(logits: torch.Tensor, words: torch.Tensor, mask_of_row: torch.Tensor) -> torch.Tensor:
    """Return [R, V], the logits with -inf where a row's mask does not allow the token. Never waits
    for the device.

    Args:
        logits: [R, V], bf16, fp16 or fp32, each row contiguous; R is at least 1.
        words: int32 [M, W], W = ceil(V / 32): bit t % 32 (lowest first) of word t // 32 allows t.
        mask_of_row: int32 [R], each row's mask, or -1 for none.
    """
    num_rows, vocab_size = logits.shape
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    _mask_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        out,
        logits,
        words,
        mask_of_row,
        vocab_size,
        logits.stride(0),
        out.stride(0),
        words.stride(0),
        BLOCK=BLOCK,
        num_warps=8,
    )
    return out


@launched
@triton.jit
def _mask_kernel(
    out,
    logits,
    words,
    mask_of_row,
    vocab_size,
    logits_stride,
    out_stride,
    words_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < vocab_size
    mask = tl.load(mask_of_row + row).to(tl.int64)
    value = tl.load(logits + row * logits_stride + column, mask=is_token)
    if mask >= 0:
        word = tl.load(words + mask * words_stride + column // 32, mask=is_token, other=0)
        is_allowed = ((word >> (column % 32)) & 1) != 0
        value = tl.where(is_allowed, value, float("-inf"))
    tl.store(out + row * out_stride + column, value, mask=is_token)
