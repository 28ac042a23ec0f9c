"""DraftGaps: the KV blocks, and slots of the host tier, that may lack tokens of a draft model,
whose KV is part of each. Kept without one too: it costs a few bytes.

All ranks of a stage must know the same, since they compute together what rows lack. So it follows
from the steps alone, and from moves that the driver uses only once they have succeeded on all.
"""

import numpy as np

from worker_daemon.contracts.arrays import Bools, Int32s


class DraftGaps:
    """Owned by RequestState, used on the step thread."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        """Starts as restart leaves it."""
        self.of_blocks: Bools = np.ones(num_blocks, np.bool_)
        """[num_blocks] True if a token of the block may be missing."""
        self._of_slots: Bools = np.ones(num_slots, np.bool_)
        """[num_slots] likewise."""

    def restart(self) -> None:
        """Assume that everything is missing, as on a rank that has just been made."""
        self.of_blocks.fill(True)
        self._of_slots.fill(True)

    def store(self, block_ids: Int32s, slots: Int32s) -> None:
        """Note that a step stores blocks [n] in slots [n]."""
        self._of_slots[slots] = self.of_blocks[block_ids]

    def load(self, block_ids: Int32s, slots: Int32s) -> None:
        """Note that a step loads blocks [n] from slots [n]."""
        self.of_blocks[block_ids] = self._of_slots[slots]

    def receive(self, slots: Int32s) -> None:
        """Note slots [n] that were filled from another group, whose draft model, if there is one
        here, is the same: it has computed prompts with their steps."""
        self._of_slots[slots] = False
