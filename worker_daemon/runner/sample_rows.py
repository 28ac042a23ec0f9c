"""Values for the tokens that a step samples, on the host and on the device, and for their results.

Most sequences that sample take one token. One that takes several has a sample after each of its
last tokens in the step. Its newest sample, the last one, is what it gains; the others are at the
positions of tokens that it has.

Shapes: R samples, Q sequences that sample.
"""

from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.report import Report
from worker_daemon.runner.scheduled_step import StepExtensions
from worker_daemon.runner.slot_bitmap import slot_bitmap
from worker_daemon.runner.staging import Delivery
from worker_daemon.runner.token_history import Sampled

BY_LOGITS: Final = 1
"""A bit of SampleRows.used that belongs to no part: the rows' most likely tokens are unknown,
because the step failed."""


class SampleRows(NamedTuple):
    """The samples of a step, those of a sequence in order. The device's columns may be longer:
    padding points at the spare row."""

    slots_np: Int64s
    """[R] ascending; repeated for the samples of a sequence."""
    generations: Int64s
    """[R] generations of the rows when the step was accepted."""
    positions_np: Int32s
    """[R] position of the token that is sampled: an upper bound where `are_bounds`."""
    used: int
    """The bits of the parts that any row uses; 0: every row takes its most likely token and reports
    nothing else."""
    slots: Tensor
    """int32 [>= R], device"""
    token_indices: Tensor
    """int32 [>= R], device: index in the step of the token that each sample follows."""
    positions: Tensor
    """int32 [>= R], device"""
    delivery: Delivery | None
    """The place to which the device writes the most likely tokens; None if they are copied."""
    are_bounds: bool = False
    """True if a row's tokens may have been refused: then only the device has all positions."""
    known_bitmap: bytes = b""
    """slots_np as the bitmap of a reply, if it was packed before."""
    given: tuple[Int32s, ...] = ()
    """[R] the tokens that came with the admission of each one's row. Empty if no sequence has more
    than one sample: then R is Q."""

    @property
    def bitmap(self) -> bytes:
        """Return slots_np as the bitmap of a reply."""
        return self.known_bitmap or slot_bitmap(self.slots_np)

    @property
    def sampled(self) -> Sampled:
        """The columns that the token history keeps."""
        if self.given:
            newest = np.flatnonzero(self.num_newer == 0)
            columns = (self.slots_np[newest], self.generations[newest], self.positions_np[newest])
            return Sampled(*columns, self.are_bounds)
        return Sampled(self.slots_np, self.generations, self.positions_np, self.are_bounds)

    @property
    def num_newer(self) -> Int64s:
        """[R] number of later samples of the same sequence; 0 for the one that it gains."""
        if not self.given:
            return np.zeros(self.slots_np.size, np.int64)
        ends = np.searchsorted(self.slots_np, self.slots_np, side="right")
        return ends - 1 - np.arange(self.slots_np.size)

    def newest(self) -> "SampleRows":
        """Return the samples that sequences gain, [Q], without padding."""
        if self.given:
            return self.keep(np.flatnonzero(self.num_newer == 0), self.used)
        return self.without_padding()

    def newest_of(self, column: Tensor) -> Tensor:
        """Return the entries [Q] of a column [>= R] for the samples that sequences gain."""
        if self.given:
            return column[upload(np.flatnonzero(self.num_newer == 0), column.device)]
        return column[: self.slots_np.size]

    def keep(self, chosen: Int64s, used: int) -> "SampleRows":
        """Return these samples only, in separate columns. chosen [R'] int64: their indices,
        ascending; used: the bits of the parts that their rows use."""
        columns = (self.slots, self.token_indices, self.positions)
        if self.slots.shape[0]:  # otherwise the step failed before it had any
            on_device = upload(chosen, self.slots.device)
            columns = (columns[0][on_device], columns[1][on_device], columns[2][on_device])
        slots = self.slots_np[chosen]
        has_several = self.given and (slots[1:] == slots[:-1]).any()
        return SampleRows(
            slots,
            self.generations[chosen],
            self.positions_np[chosen],
            used | self.used & BY_LOGITS,
            *columns,
            None,
            self.are_bounds,
            given=tuple(self.given[place] for place in chosen.tolist()) if has_several else (),
        )

    def without_padding(self) -> "SampleRows":
        """Return the same rows, with device columns cut to [R]."""
        count = self.slots_np.size
        return self._replace(
            slots=self.slots[:count],
            token_indices=self.token_indices[:count],
            positions=self.positions[:count],
        )


class SamplingInputs(NamedTuple):
    """Logits and tokens to sample from: empty tensors on a stage that does not sample."""

    logits: Tensor
    """[R, v] this rank's share of the logits of each sample, in the model's dtype and with the
    vocabulary's padding. Of a step, a view of the stage's buffer, to which only the next step
    writes."""
    greedy: Tensor
    """int64 [R] the most likely token."""
    inputs: Tensor | None = None
    """int64 [R] the token that each sample follows, if it may have to be computed again; otherwise
    None."""

    def keep(self, kept: Int64s, *, by_logits: bool = True) -> "SamplingInputs":
        """Return a copy of these rows only: kept int64 [R'] indexes the rows. by_logits: False
        leaves the logits out, which are large."""
        if not self.greedy.shape[0]:
            return self
        on_device = upload(kept, self.greedy.device)
        logits = self.logits[on_device] if by_logits else self.logits[:0]
        inputs = None if self.inputs is None else self.inputs[on_device]
        return SamplingInputs(logits, self.greedy[on_device], inputs)


class Unsampled(NamedTuple):
    """A step after its forward pass. Valid until the next step runs, what is deferred of it for
    longer."""

    rows: SampleRows
    chosen: SamplingInputs | None
    """None if the step failed on this rank before it was known."""
    status: Tensor
    """int64 [], see distributed/pp.py; on the device if there are other stages."""
    step_values: StepExtensions
    reports: tuple[Report, ...] = ()
    """Reports of the forward pass, such as the outputs of requests that pool. They do not wait for
    the step's sampling."""

    def keep(self, kept: Int64s, used: int) -> "Unsampled":
        """Return a copy of these rows only, without reports, which no later step overwrites. kept
        int64 [R'] indexes the rows; used: the bits of the parts that these use."""
        chosen = None if self.chosen is None else self.chosen.keep(kept)
        return Unsampled(self.rows.keep(kept, used), chosen, self.status, self.step_values)

    def take(self, taken: Int64s, used: int, later: StepExtensions) -> "Unsampled":
        """Return these rows only, without reports, to be sampled now. taken int64 [R'] indexes the
        rows; used: as for keep; later: extensions of the message that samples them, if it is
        another."""
        rows, step_values = self.rows.keep(taken, used), self.step_values.with_those_of(later)
        chosen = self.chosen
        if chosen is not None and taken.size < self.rows.slots_np.size:
            chosen = chosen.keep(taken, by_logits=bool(rows.used | step_values.used))
        return Unsampled(rows, chosen, self.status, step_values)
