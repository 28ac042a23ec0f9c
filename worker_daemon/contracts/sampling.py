"""The interface of sampling tokens from logits, which kernels and plain torch implement.

Shapes: R rows, V vocabulary.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of each row, on the device. The any_ flags only save work: a flag that is
    true without need is harmless."""

    temperature: Tensor
    """float32 [R]; 0 means greedy."""
    top_k: Tensor
    """int32 [R]; 0 means all tokens."""
    top_p: Tensor
    """float32 [R] in (0, 1]; 1 means all tokens."""
    min_p: Tensor
    """float32 [R] in [0, 1]; 0 means all tokens."""
    seeds: Tensor
    """int64 [R], any 64-bit pattern."""
    positions: Tensor
    """int64 [R]: the sampled token's position in its sequence."""
    any_random: bool
    any_top_k: bool
    """False only if top_k is 0 in every row that is not greedy."""
    any_top_p: bool
    """False only if top_p is 1 in every row that is not greedy."""
    any_min_p: bool


class Sampling(Protocol):
    """Chooses tokens. All implementations choose the same, except for the last bit of exp and
    log."""

    name: str

    def tokens(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return int64 [R], one token for each row of logits [R, V]. Logits are float32, bf16 or
        fp16, which does not matter for equal values; each row is contiguous. They are not changed.
        A row gives NO_TOKEN if one of its logits is NaN, or the largest is infinite.

        Greedy rows take the largest logit, the lowest id among equals. Other rows apply
        temperature, then min-p, top-k and top-p, each to what the one before left (at least one
        token), and take the largest sum of logit and Gumbel noise. top-k and top-p keep all tokens
        that tie with the last one kept.
        """
