"""Prefetches memory before it is needed."""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers, num_bytes, LANES: tl.constexpr):
    """Prefetch num_bytes at each of LANES pointers into L2; both are multiples of 16.

    Only a hint. Threads from LANES on hold copies of the pointers and prefetch nothing. L2 is
    coherent, so weights that a previous kernel still writes are read again.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred %mine<3>;
        .reg .u32 %thread;
        mov.u32 %thread, %tid.x;
        setp.lt.u32 %mine0, %thread, """
        + LANES
        + """;
        setp.gt.s32 %mine1, $2, 0;
        and.pred %mine2, %mine0, %mine1;
        @%mine2 cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointers, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
