"""Gumbel noise as a pure function of (seed, position, token id), for sampling by the Gumbel-max
trick.

argmax(logits + noise) is a draw from softmax(logits); with stateless noise a replay, another batch
or another split of the model gives the same token.
"""

import torch
from torch import Tensor

from worker_daemon.sample.philox import philox4x32

_MASK = 0xFFFFFFFF
_LANES = 4
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """seeds int64 [R] (64-bit pattern), positions int64 [R] (below 2^32) -> float32 [R, V], all
    finite.

    Token t takes word t % 4 of Philox with key = seed halves and counter = (t // 4, position, 0,
    0). With u uniform in (0, 1), the noise is -log(-log1p(-u)): large values, which decide an
    argmax, come from small u, where float32 and log1p keep their full relative precision. u is kept
    below 1; the noise lies between -2.9 and 22.9.
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
