"""The outcome of a step's drafts (speculative decoding), which kernels and plain torch decide.

Shapes: R samples, Q sequences that sample, K num_speculative_tokens; R and Q with padding.
"""

from typing import NamedTuple

from torch import Tensor


class Verified(NamedTuple):
    """The samples that sequences gain: those up to the first that differs from the draft after it,
    or that a NO_TOKEN follows. So no sequence gains a NO_TOKEN behind a draft: its next step
    samples there again. On the device. Padding gains and refuses nothing."""

    rows: Tensor
    """int32 [Q] the request row of each sequence; the spare row for padding."""
    gained: Tensor
    """int64 [Q, 1 + K] the tokens of each sequence, oldest first; then NO_TOKEN."""
    counts: Tensor
    """int32 [Q] their number: at least 1; 0 for padding."""
    lengths: Tensor
    """int32 [Q] tokens of its row, these included; 0 for padding."""
    refused: Tensor
    """int32 [Q] samples that it does not gain."""
    total: Tensor
    """int32 [Q] its row's refusals so far."""
    kept: Tensor
    """int64 [R] each sample's token; NO_TOKEN if its sequence does not gain it. Any value for
    samples of no sequence."""
