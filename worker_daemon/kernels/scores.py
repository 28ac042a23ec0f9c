"""The way from products of queries and keys to scores: scale and softcap; and attention sinks. The
host's side, and device functions of the attention kernels.

Kernels keep scores in log2 units, for exp2. A layer without a softcap or sinks has None instead,
for which the compiler drops them.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionSinks

_LOG2_E = math.log2(math.e)
LOG2_OF_E = tl.constexpr(_LOG2_E)


@dataclass(frozen=True, slots=True)
class Scoring:
    """A layer's rule for scores, and the arguments of a launch that come from it."""

    scale: float
    """Factor of the products, above 0."""
    window: int | None
    """Keys that a query sees, itself included; None = all."""
    logit_softcap: float | None = None
    """See AttentionLayer."""
    sinks: AttentionSinks | None = None
    """See AttentionLayer."""

    def __post_init__(self) -> None:
        assert self.scale > 0
        assert self.window is None or self.window > 0
        assert self.logit_softcap is None or self.logit_softcap > 0

    @property
    def factor(self) -> float:
        """Factor of the products in the kernels: the scale in log2 units, or the factor that
        softcapped() takes."""
        if self.logit_softcap is None:
            return self.scale * _LOG2_E
        return 2 * self.scale / self.logit_softcap * _LOG2_E

    @property
    def softcap(self) -> float | None:
        """The cap in log2 units, SOFTCAP of the kernels."""
        return None if self.logit_softcap is None else self.logit_softcap * _LOG2_E

    @property
    def sink_values(self) -> torch.Tensor | None:
        """[Hq], contiguous."""
        return None if self.sinks is None else self.sinks.values


@triton.jit
def softcapped(products, factor, SOFTCAP: tl.constexpr):
    """Return cap * tanh(scale * product / cap) in log2 units; factor: Scoring.factor."""
    # tanh(x) = 2 / (1 + exp(-2 x)) - 1. Near 0 it is exact to 2^-23 of the cap, which is less than
    # the rounding of scores to 16 bits.
    return 2.0 * SOFTCAP / (1.0 + tl.exp2(-factor * products)) - SOFTCAP


@triton.jit
def join_sinks(acc, row_sum, row_max, sinks, joins):
    """Fold sinks into the running softmax of a tile (attention_tiles.attend), whose row_max is not
    infinite. sinks are pointers, one for each row or one for all; joins masks them. A sink must
    join once for each query, so only in one of its splits."""
    sink = tl.load(sinks, mask=joins, other=float("-inf")).to(tl.float32) * LOG2_OF_E
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    return acc * rescale[:, None], row_sum * rescale + tl.exp2(sink - new_max), new_max
