"""Computes Gumbel noise as a pure function of (seed, position, token id), for sampling by the
Gumbel-max trick.

argmax(logits + noise) samples from softmax(logits). Since the noise is stateless, a replay, another
batch or another split of the model gives the same token.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_LANES = 4
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """seeds int64 [R] (64-bit pattern), positions int64 [R] (below 2^32) -> float32 [R, V], all
    finite.

    Token t takes word t % 4 of Philox with key = seed halves and counter = (t // 4, position, 0,
    0). With u uniform in (0, 1), the noise is -log(-log1p(-u)): large values, which decide an
    argmax, come from small u, where float32 and log1p have full relative precision. u is kept below
    1; the noise lies between -2.9 and 22.9.
    """
    groups = torch.arange(-(-vocab_size // _LANES), device=seeds.device).unsqueeze(0)
    zero = torch.zeros_like(groups)
    words = philox4x32(
        (groups, (positions & _MASK).unsqueeze(1), zero, zero),
        ((seeds & _MASK).unsqueeze(1), ((seeds >> 32) & _MASK).unsqueeze(1)),
    )
    uniform = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size].to(torch.float32)
    uniform = uniform.add_(0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random 32-bit words for each counter, by Philox4x32-10: Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3" (SC 2011). The same on every device and for every batch.

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
    """Return the high and low half of the 64-bit product; int64 wraps, which keeps all 64 bits."""
    product = a * b
    return (product >> 32) & _MASK, product & _MASK
