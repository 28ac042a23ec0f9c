"""Root-mean-square norms over all queries of a token together, and over all its keys, in place
between the qkv projection and the rotation.

One program takes the queries or the keys of one token, with a tile that depends only on their
number, so that a row's result does not depend on other rows. If several ranks share the heads, one
launch computes each rank's share of the means of squares, and a second one applies their sum.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import SpanNorms
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next
from worker_daemon.kernels.norm import MAX_SIZE


def span_means(
    qkv: torch.Tensor, norms: SpanNorms, num_ranks: int, *, pdl: bool = False
) -> torch.Tensor:
    """Return this rank's shares of the means of squares of queries and keys.

    Args:
        qkv: [N, (Hq + 2 Hkv) D] contiguous, fp32, bf16 or fp16; Hq D and Hkv D are at most
            MAX_SIZE.
        norms: of the heads of qkv.
        num_ranks: number of ranks, whose shares are summed.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        fp32 [N, 2].
    """
    means = torch.empty((qkv.shape[0], 2), dtype=torch.float32, device=qkv.device)
    _launch(qkv, norms, means, num_ranks, measures=True, applies=False, pdl=pdl)
    return means


def norm_spans(
    qkv: torch.Tensor, norms: SpanNorms, means: torch.Tensor | None, *, pdl: bool = False
) -> torch.Tensor:
    """Normalize queries and keys in place: x / sqrt(mean(x^2) + eps) * weight, in float32, rounded
    once.

    Args:
        qkv: see span_means. Overwritten.
        norms: weight [(Hq + Hkv) D], contiguous.
        means: fp32 [N, 2] contiguous, the means over all ranks; None: qkv has all heads.
        pdl: see span_means.

    Returns:
        qkv.
    """
    assert means is None or (means.is_contiguous() and means.dtype == torch.float32)
    _launch(qkv, norms, means, 1, measures=means is None, applies=True, pdl=pdl)
    return qkv


def _launch(
    qkv: torch.Tensor,
    norms: SpanNorms,
    means: torch.Tensor | None,
    num_ranks: int,
    *,
    measures: bool,
    applies: bool,
    pdl: bool,
) -> None:
    num_rows, width = qkv.shape
    key_size = norms.weight.shape[0] - norms.query_size
    assert qkv.is_contiguous()
    assert norms.weight.is_contiguous()
    assert width == norms.query_size + 2 * key_size
    assert max(norms.query_size, key_size) <= MAX_SIZE
    if num_rows == 0:
        return
    block = triton.next_power_of_2(max(norms.query_size, key_size))
    _span_norm_kernel[(num_rows, 2)](
        qkv,
        norms.weight,
        means,
        norms.eps,
        QUERY_SIZE=norms.query_size,
        KEY_SIZE=key_size,
        QUERY_BLOCK=triton.next_power_of_2(norms.query_size),
        KEY_BLOCK=triton.next_power_of_2(key_size),
        RANKS=num_ranks,
        MEASURES=measures,
        APPLIES=applies,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit
def _span_norm_kernel(
    qkv,
    weight,
    means,
    eps,
    QUERY_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    MEASURES: tl.constexpr,
    APPLIES: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = qkv + token * (QUERY_SIZE + 2 * KEY_SIZE)
    if tl.program_id(1) == 0:
        _norm_span(
            row,
            weight,
            means,
            token * 2,
            eps,
            QUERY_SIZE,
            QUERY_BLOCK,
            RANKS,
            MEASURES,
            APPLIES,
            PDL,
        )
    else:
        _norm_span(
            row + QUERY_SIZE,
            weight + QUERY_SIZE,
            means,
            token * 2 + 1,
            eps,
            KEY_SIZE,
            KEY_BLOCK,
            RANKS,
            MEASURES,
            APPLIES,
            PDL,
        )


@triton.jit
def _norm_span(
    span,
    weight,
    means,
    mean_index,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    MEASURES: tl.constexpr,
    APPLIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm SIZE elements in place by their own mean of squares, if MEASURES, or by a given one; or
    only store the share of the mean."""
    element = tl.arange(0, BLOCK)
    inside = element < SIZE
    if APPLIES:
        gain = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    await_previous(PDL)
    value = tl.load(span + element, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value * value) / (SIZE * RANKS) if MEASURES else tl.load(means + mean_index)
    if APPLIES:
        normed = value * tl.rsqrt(mean + eps) * gain
        tl.store(span + element, normed.to(span.dtype.element_ty), mask=inside)
    else:
        tl.store(means + mean_index, mean)
