"""The interface of sampling tokens from logits, which kernels and plain torch implement.

Shapes: S request rows, R rows that sample, V vocabulary, M masks, W = ceil(V / 32) words of a mask.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of each row, on the device. The any_ flags only save work: a flag may be
    true without need."""

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


@dataclass(frozen=True, slots=True)
class PenaltyTables:
    """Tables of the request rows for penalties, on the device."""

    seen: Tensor
    """int16 [S, V]: the low 15 bits count a token in a row's output; the sign bit is set if its
    prompt has it."""
    weights: Tensor
    """float32 [S, 3]: presence, frequency and repetition penalty. (0, 0, 1) changes nothing."""


class DraftsBefore(NamedTuple):
    """The drafts that samples follow, on the device. Before sample i come its row's own tokens,
    then the drafts inputs[i - num_before[i] + 1 : i + 1]."""

    num_before: Tensor
    """int32 [R]"""
    inputs: Tensor
    """int64 [R], the token that each sample follows."""
    most: int
    """The largest of num_before, at least 1."""


class Sampling(Protocol):
    """Chooses tokens. All implementations choose the same, except for the last bit of exp and
    log."""

    name: str

    def masked(self, logits: Tensor, words: Tensor, mask_of_row: Tensor) -> Tensor:
        """Return [R, V], the logits with -inf where a row's mask does not allow the token. logits:
        as in tokens, R at least 1, not changed. words: int32 [M, W], bit t % 32 (lowest first) of
        word t // 32 allows token t. mask_of_row: int32 [R], or -1 for a row without a mask."""

    def tokens(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return int64 [R], one token for each row of logits [R, V]. Logits are float32, bf16 or
        fp16, with the same result for equal values; each row is contiguous. They are not changed.
        A row gives NO_TOKEN if one of its logits is NaN, or the largest is infinite.

        Greedy rows take the largest logit, the lowest id among equals. Other rows apply
        temperature, then min-p, top-k and top-p, each to the tokens that the previous filter kept
        (at least one), and take the largest sum of logit and Gumbel noise. top-k and top-p keep all
        tokens that tie with the last one kept.
        """

    def penalized(
        self,
        logits: Tensor,
        slots: Tensor,
        tables: PenaltyTables,
        drafts: DraftsBefore | None = None,
    ) -> Tensor:
        """Return float32 [R, V]: logits [R, V], each row contiguous, of the request rows int32 [R],
        with their penalties applied. Logits of tokens in prompt or output are divided by the
        repetition penalty if positive, otherwise multiplied by it; then the frequency penalty is
        subtracted for each occurrence in the output, and the presence penalty once. drafts: of each
        sample, count as output behind what the tables have."""

    def count_tokens(
        self, slots: Tensor, token_ids: Tensor, tables: PenaltyTables, most: int = 1
    ) -> None:
        """Count tokens in the output of request rows: int32 [R]; int64 [R], negative where there is
        none. A row has at most `most` entries, which are neighbours. Counts stop at 2^15 - 1."""
