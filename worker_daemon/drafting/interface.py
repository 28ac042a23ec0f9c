"""The interface of a drafter: it follows the rows' tokens on the device that samples them, and
proposes the next ones.

Shapes: S rows, Q sequences that sampled in a step, K num_speculative_tokens.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from worker_daemon.contracts.arrays import Int32s

NO_PROPOSAL: Final = 0
"""In place of a draft. It is a token: a step that is given it as a draft verifies it like any
other."""


class Gained(NamedTuple):
    """The tokens that rows have gained in a step. Device tensors."""

    rows: Tensor
    """int32 [Q]: request rows, each at most once."""
    token_ids: Tensor
    """int64 [Q, 1 + K] oldest first; NO_TOKEN (-1) after the last one. A row whose first entry is
    NO_TOKEN has failed."""
    counts: Tensor
    """int32 [Q] tokens gained, 0 to 1 + K."""


class Drafter(Protocol):
    """Makes drafts on the last stage. Every rank of a tensor-parallel stage has one, and they
    propose the same. Used on the step thread only."""

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """Begin to follow new requests in these rows, each with all tokens that it has. A request
        that resumes after a failure, a preemption or under another driver begins again."""

    def propose(self, gained: Gained) -> Tensor:
        """Follow the tokens that rows have gained, and return int64 [Q, K]: the drafts of their
        next tokens, NO_PROPOSAL where there is none. Never waits for the device."""

    def forget(self) -> None:
        """Drop all rows: before a new driver, or new weights."""
