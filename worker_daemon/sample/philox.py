"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as
1, 2, 3" (SC 2011).

Stateless: the same counter and key give the same words on every device and for every batch.
"""

from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random 32-bit words for each counter.

    All tensors are int64 with values in [0, 2^32) and broadcast against each other; so are the
    results.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low half of the 64-bit product; int64 wraps, which keeps all 64 bits."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
