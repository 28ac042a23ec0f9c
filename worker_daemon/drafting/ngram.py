"""Prompt lookup: a row's drafts are the tokens that followed its last ones where these stood before
in its prompt or output.

The longest match counts, and among equals the last one. Matches may overlap the text's end: after
"abcabc" the drafts are "abcabc...". So a text that repeats itself is drafted K tokens at a time
from its second period on, not only up to its end. Wherever a match is, drafts that pass the text's
end begin again at the match: that is what a lookup after each draft would mostly find, and a step
verifies K drafts in any case.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rpc_schema.config import SpeculativeConfig
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.drafting import Matching, TextKernels
from worker_daemon.drafting.interface import ComputedStep, Gained
from worker_daemon.drafting.row_texts import DraftLimits, RowTexts


class NgramDrafter:
    """The drafter of the method ngram. Owns the texts of its rows, on the device."""

    def __init__(
        self,
        config: SpeculativeConfig,
        limits: DraftLimits,
        device: torch.device,
        kernels: TextKernels,
    ) -> None:
        self._texts = RowTexts(limits, device, kernels)
        self._matching = Matching(
            config.prompt_lookup_max, config.prompt_lookup_min, limits.num_drafts
        )

    @property
    def follower(self) -> None:
        """See Drafter."""
        return None

    @property
    def texts(self) -> Tensor:
        """See Drafter."""
        return self._texts.table.tokens

    @staticmethod
    def num_bytes(config: SpeculativeConfig, limits: DraftLimits) -> int:
        """Return the device memory that a drafter takes."""
        return RowTexts.num_bytes(limits)

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter."""
        self._texts.begin(slots, tokens)

    def follow(self, step: ComputedStep) -> None:
        """See Drafter: the texts have the step's tokens."""

    def propose(self, gained: Gained) -> Tensor:
        """See Drafter."""
        self._texts.gain(gained)
        return self._texts.continuations(gained.rows, self._matching)

    def forget(self) -> None:
        """See Drafter."""
        self._texts.forget()

    def restart(self) -> None:
        """See Drafter."""
        self._texts.restart()

    def compile_subset(self) -> "NgramDrafter":
        """See Drafter."""
        return self
