"""Device functions for kernels: norm and rotation of heads, in the registers of a program that uses
them.

Of the first ROTARY_DIM elements of a head, R of them, element i has the partner i + R / 2 or
i - R / 2 (the form that checkpoints of the Llama family use) or, if INTERLEAVED, its neighbor in
the pair (2 j, 2 j + 1). Both are loaded rather than exchanged, so that a head has the same layout
in its tile as any other row. The other elements stay.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from worker_daemon.kernels.norm import offset_gain


@triton.jit
def load_angles(
    rotary_table,
    position,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return cos and sin [ROWS, BLOCK_D] fp32 of a position; sin has the sign for the
    multiplication with the partner. They are 1 and 0 where nothing is rotated. rotary_table is
    [P, 2, ROTARY_DIM / 2] fp32: cos, then sin."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    # Padding is 0 whatever its factor is.
    UNTURNED: tl.constexpr = 0.0 if ROTARY_DIM == HEAD_DIM else 1.0
    dim = tl.arange(0, BLOCK_D)
    # Loaded for every row: a row shared by all rows would pass through shared memory.
    angle = rotary_table + position.to(tl.int64) * ROTARY_DIM
    angle += dim // 2 if INTERLEAVED else dim % HALF
    angle = tl.broadcast_to(angle[None, :], [ROWS, BLOCK_D])
    turns = (dim < ROTARY_DIM)[None, :]
    cos = tl.load(angle, mask=turns, other=UNTURNED)
    sin = tl.load(angle + HALF, mask=turns, other=0.0)
    is_first = dim % 2 == 0 if INTERLEAVED else dim < HALF
    return cos, tl.where(is_first[None, :], -sin, sin)


@triton.jit
def load_pairs(
    heads,
    inside,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the elements of heads and their partners, [ROWS, BLOCK_D] fp32 each. heads [ROWS]
    points at each row's head; inside [ROWS, BLOCK_D] masks both."""
    dim = tl.arange(0, BLOCK_D)
    own = tl.load(heads[:, None] + dim[None, :], mask=inside, other=0.0)
    if INTERLEAVED:
        partner_dim = dim ^ 1
    else:
        partner_dim = (dim + ROTARY_DIM // 2) % ROTARY_DIM
        if ROTARY_DIM != HEAD_DIM:
            partner_dim = tl.where(dim < ROTARY_DIM, partner_dim, dim)
    partner = tl.load(heads[:, None] + partner_dim[None, :], mask=inside, other=0.0)
    return own.to(tl.float32), partner.to(tl.float32)


@triton.jit
def load_gains(
    weights,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORMED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
):
    """Return a norm's factors [HEAD_DIM] for turn, the same in every row; ones if not NORMED."""
    if NORMED:
        in_head = tl.broadcast_to((tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :], [ROWS, BLOCK_D])
        row = tl.zeros([ROWS], tl.int32)
        own, partner = load_pairs(
            weights + row, in_head, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_D
        )
        own, partner = offset_gain(own, WEIGHT_OFFSET), offset_gain(partner, WEIGHT_OFFSET)
    else:
        own, partner = 1.0, 1.0
    return own, partner


@triton.jit
def turn(
    own, partner, own_gain, partner_gain, eps, cos, sin,
    NORMED: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Return heads [ROWS, BLOCK_D] fp32 after their norm, if NORMED, and their rotation, not
    rounded.

    The arithmetic is that of rope_store.py, except for the order of the norm's sum."""
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + eps)[:, None]
        own *= scale * own_gain
        partner *= scale * partner_gain
    return own * cos + partner * sin
