"""Device functions for FP8 (contracts/fp8.py).

An attention kernel gets the scales of the KV heads, or None if the cache has the model's dtype. A
program serves one KV head, so its scales are two scalars: one multiplies the scores, one the
output.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from worker_daemon.contracts.fp8 import FP8_MAX

_MOST = tl.constexpr(FP8_MAX)


@triton.jit
def quantize(x, scale):
    """Return x times the reciprocal of scale, a scalar, limited to the range of FP8 and rounded to
    it; NaN stays NaN."""
    scaled = x.to(tl.float32) * tl.div_rn(1.0, scale)
    return tl.clamp(scaled, -_MOST, _MOST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def head_scales(kv_scales, kv_head, num_kv_heads):
    """Return the scales of a KV head's keys and of its values, from kv_scales, float32 [2,
    num_kv_heads]; 1 if that is None, for which the compiler drops the products."""
    if kv_scales is None:
        of_keys, of_values = 1.0, 1.0
    else:
        of_keys = tl.load(kv_scales + kv_head)
        of_values = tl.load(kv_scales + num_kv_heads + kv_head)
    return of_keys, of_values
