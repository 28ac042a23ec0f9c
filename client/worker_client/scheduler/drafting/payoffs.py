"""Notes whether drafts are worth their cost for good, and tells when that changes."""

import logging
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.drafting.growing_arrays import grown

Int64s = NDArray[np.int64]

STOPS_AFTER: Final = 64
"""Steps in a row without drafts after which they count as given up."""
PAYS_AFTER: Final = 256
"""Steps in a row with drafts after which they have paid: nothing is left of FIRST_RATE."""
FIRST_SIZE: Final = 16
RESUMES_AFTER: Final = 16
"""Steps in a row with drafts after which they pay again."""

_LOG = logging.getLogger(__name__)


class DraftingChange(NamedTuple):
    """Drafts that have paid do not any more, for good; or they pay again."""

    req_id: str | None
    """The request; None: all of them."""
    pays: bool
    acceptance: float
    """Share of first drafts that are accepted, as it is now."""


OnDraftingChange: TypeAlias = Callable[[DraftingChange], None]


def log_change(change: DraftingChange) -> None:
    """Log a change, as the event drafting_stopped or drafting_resumed; of a single request as
    request_drafting_stopped, ..."""
    whose = "drafts" if change.req_id is None else f"drafts of request {change.req_id!r}"
    what = "pay again" if change.pays else "do not pay any more, and are left out"
    event = "drafting_resumed" if change.pays else "drafting_stopped"
    if change.req_id is not None:
        event = f"request_{event}"
    share = 100 * change.acceptance
    _LOG.warning("%s %s: %.0f %% are accepted", whose, what, share, extra={"event": event})


class Payoffs:
    """Notes whether drafts pay for good, for each of some holders, by number. That changes once
    enough steps in a row have contradicted it."""

    def __init__(self) -> None:
        self._pays = np.zeros(FIRST_SIZE, np.bool_)
        self._has_paid = np.zeros(FIRST_SIZE, np.bool_)
        """False as long as they never were worth it."""
        self._in_a_row = np.zeros(FIRST_SIZE, np.int64)
        """Steps in a row that contradict."""

    def begin(self, holder: int) -> None:
        """Begin with a holder of whom nothing is known; one that had its number before is
        forgotten."""
        while holder >= self._pays.size:
            size = 2 * self._pays.size
            self._pays, self._has_paid = grown(self._pays, size), grown(self._has_paid, size)
            self._in_a_row = grown(self._in_a_row, size)
        self._pays[holder] = self._has_paid[holder] = False
        self._in_a_row[holder] = 0

    def pays(self, holder: int) -> bool:
        """Return True if drafts are worth their cost for a holder."""
        return bool(self._pays[holder])

    def note(self, holders: Int64s, has_drafts: NDArray[np.bool_], num_steps: int) -> Int64s:
        """Note which holders have drafts in so many steps, where their cost is known. Return the
        places of those whose drafts have paid and cease to, or pay again."""
        contradicts = has_drafts != self._pays[holders]
        in_a_row = np.where(contradicts, self._in_a_row[holders] + num_steps, 0)
        had_paid = self._has_paid[holders]
        to_pay = np.where(had_paid, RESUMES_AFTER, PAYS_AFTER)
        turns = contradicts & (in_a_row >= np.where(has_drafts, to_pay, STOPS_AFTER))
        self._in_a_row[holders] = np.where(turns, 0, in_a_row)
        if not turns.any():
            return np.zeros(0, np.int64)
        turned = holders[turns]
        self._pays[turned] = has_drafts[turns]
        self._has_paid[turned] = True
        return np.flatnonzero(turns & had_paid)
