"""The operations of a layer with experts (mixture of experts), which a device may fuse.

A router scores every expert for every token. The top_k best experts process the token, and their
results are added by weight (Shazeer et al., 2017; Jiang et al., 2024).

Shapes: N tokens, H hidden size, E experts of the model, L experts on this rank, K experts of a
token, I inner size of an expert on this rank.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from torch import Tensor

MAX_TILE_ROWS: Final = 128
"""The most rows of one expert that a kernel multiplies as one tile. The inner values of an expert's
last tile are padded to as many rows."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule that turns a token's scores into experts and weights: softmax over all scores, in
    float32, then the largest. Among equals the expert with the lower number comes first."""

    top_k: int
    """Experts of a token, at most as many as there are."""
    renormalize: bool
    """Divide the weights of a token by their sum."""
    rounds_weights: bool
    """Round the weights to the model's dtype."""

    def given_to(self, experts: Tensor, scores: Tensor) -> "RoutedTokens":
        """Return given experts, int32 [N, K], with the weights that scores [N, E] give them. Those
        of tokens with -1 are 0."""
        chosen = experts.clamp(min=0).long()
        weights = scores.float().softmax(-1).gather(1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.rounds_weights:
            weights = weights.to(scores.dtype).float()
        return RoutedTokens(experts, weights.masked_fill(experts < 0, 0.0))


class RoutedTokens(NamedTuple):
    """The experts of each token."""

    experts: Tensor
    """int32 [N, K], each below E; -1 for padding."""
    weights: Tensor
    """float32 [N, K]; 0 for padding."""


class ClampedSwiGLU(NamedTuple):
    """The activation (up + 1) * gate * sigmoid(alpha * gate) of GPT-OSS (OpenAI, 2025), where the
    gate is clamped to at most limit, and up to -limit ... limit. NaNs stay NaN."""

    alpha: float
    limit: float


class ExpertMatrices(NamedTuple):
    """The matrices of this rank's experts: numbers first to first + L of the model, or slots
    (layers/expert_slots.py), which then stand for experts in RoutedTokens. In FP8 they have
    scales, like Fp8Matrix; inputs of their products are not quantized."""

    gate_up: Tensor
    """[L, 2 I, H], contiguous, each expert's gate before its up"""
    down: Tensor
    """[L, H, I], contiguous"""
    first: int
    """Number of the first expert."""
    gate_up_scale: Tensor | None = None
    """float32 [L, 2 I], or [L, 2 I / 128, ceil(H / 128)] for blocks; None for matrices in the
    model's dtype."""
    down_scale: Tensor | None = None
    """float32 [L, H], or [L, ceil(H / 128), ceil(I / 128)]"""
    num_experts: int = 0
    """E, or the slots of all ranks; 0 if this rank has all experts."""
    gate_up_bias: Tensor | None = None
    """[L, 2 I], the gates' before the ups'; None without biases"""
    down_bias: Tensor | None = None
    """[L, H]; None without biases, or if another rank adds them"""
    clamped: ClampedSwiGLU | None = None
    """The activation; None: silu(gate) * up."""


class ExpertOps(Protocol):
    """The products of experts. Tensors are like those of LayerOps. Never waits for the device, and
    launches the same kernels whatever experts are chosen."""

    def route(
        self,
        scores: Tensor,
        routing: Routing,
        query_start_loc: Tensor,
        loads: Tensor | None = None,
        replayed: Tensor | None = None,
    ) -> RoutedTokens:
        """Return the experts of each token: scores [N, E]. query_start_loc: int32 [B + 1], its last
        entry is the number of tokens that are not padding; padding has no experts. A row with a
        NaN has experts too, and weights that are NaN. loads: int64 [E], contiguous, to which the
        tokens routed to each expert are added; None counts nothing. replayed: int16 [N, K], experts
        to take in place of the best ones; -1 in the rows of other tokens, and of padding."""

    def multiply(self, x: Tensor, routed: RoutedTokens, matrices: ExpertMatrices) -> Tensor:
        """Return each row's sum, over those of its experts that this rank has, of weight * down
        (silu(gate x) * up x), or another activation: x [N, H] -> [N, H]. A bias is added to its
        product before that is rounded. The sum is in float32, rounded once. Rows without experts
        are 0."""
