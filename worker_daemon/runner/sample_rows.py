"""Values for the tokens that a step samples, on the host and on the device, and for their results.

Most sequences that sample take one token. One that takes several has a sample after each of its
last tokens in the step. If these tokens are its own, it gains its newest sample, the last one; if
they are drafts, it gains the samples up to the first that differs from the draft after it.

Shapes: R samples, Q sequences that sample.
"""

from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.contracts.drafts import Verified
from worker_daemon.device.pinned import upload
from worker_daemon.runner.report import Report
from worker_daemon.runner.scheduled_step import StepExtensions
from worker_daemon.runner.slot_bitmap import slot_bitmap
from worker_daemon.runner.staging import Delivery
from worker_daemon.runner.step_layout import aligned
from worker_daemon.runner.token_history import Sampled

BY_LOGITS: Final = 1
"""A bit of SampleRows.used that belongs to no part: the rows' most likely tokens are unknown,
because the step failed."""


class Drafted(NamedTuple):
    """The drafts that samples follow, in a step with drafts."""

    num_before_np: Int64s
    """[R] number of earlier samples of the same sequence: 0 for its first, which follows a token
    that it has."""
    num_before: Tensor
    """int32 [R], device: the same."""
    inputs: Tensor
    """int64 [R], device: the token that each sample follows. Before sample i with num_before j come
    the sequence's own tokens, then the drafts inputs[i - j + 1 : i + 1]."""


class SampleGroups(NamedTuple):
    """The order of a step's samples, if a sequence may have several. Computed once."""

    firsts_np: Int64s
    """[Q] index of each sequence's first sample."""
    counts_np: Int64s
    """[Q] number of samples of each sequence."""
    num_before_np: Int64s
    """[R] number of earlier samples of the same sequence."""
    num_newer_np: Int64s
    """[R] number of later samples of the same sequence."""
    firsts: Tensor
    """int32 [Q + 1], device: firsts_np, then R. Like num_before, [0] if the samples are of no step,
    or of one that failed before it had device columns."""
    num_before: Tensor
    """int32 [R], device: num_before_np."""

    @property
    def newest_np(self) -> Int64s:
        """[Q] index of each sequence's last sample."""
        return self.firsts_np + self.counts_np - 1

    @property
    def newest(self) -> Tensor:
        """int32 [Q], device: the same."""
        return self.firsts[1:] - 1

    def on(self, firsts: Tensor, num_before: Tensor) -> "SampleGroups":
        """Return the same groups with the device columns of another step: int32 [>= Q + 1] and
        [>= R]."""
        num_seqs, num_samples = self.firsts_np.size, self.num_before_np.size
        return self._replace(firsts=firsts[: num_seqs + 1], num_before=num_before[:num_samples])


def group_samples(slots: Int64s, device: torch.device | None) -> SampleGroups:
    """Return the groups of samples int64 [R] by their slots, ascending. device: of the device
    columns, which are uploaded; None leaves them empty."""
    firsts = np.flatnonzero(np.diff(slots, prepend=-1))
    counts = np.diff(firsts, append=slots.size)
    num_before = np.arange(slots.size) - np.repeat(firsts, counts)
    num_newer = np.repeat(counts, counts) - 1 - num_before
    on_device = _NO_COLUMN, _NO_COLUMN
    if device is not None:
        start = aligned(firsts.size + 1)
        both = np.zeros(start + slots.size, np.int32)
        both[: firsts.size], both[firsts.size], both[start:] = firsts, slots.size, num_before
        uploaded = upload(both, device)
        on_device = uploaded[: firsts.size + 1], uploaded[start:]
    return SampleGroups(firsts, counts, num_before, num_newer, *on_device)


_NO_COLUMN: Final = torch.zeros(0, dtype=torch.int32)


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
    than one sample, or if the step has drafts."""
    has_drafts: bool = False
    """True if some of the samples follow drafts."""
    groups: SampleGroups | None = None
    """Set if a sequence may have several samples; None: each has one, so R is Q."""
    are_verified: bool = False
    """True if the program verifies the drafts (SamplingInputs.outcome)."""
    drafted: Drafted | None = None
    """Set once the step's tokens are known, if it has drafts."""
    are_replayed: bool = False
    """True if the samples are of no step: each is in the place of a token that its row has, or that
    its request has brought."""

    @property
    def bitmap(self) -> bytes:
        """Return slots_np as the bitmap of a reply."""
        return self.known_bitmap or slot_bitmap(self.slots_np)

    @property
    def sampled(self) -> Sampled:
        """The columns that the token history keeps: of the first token that each sequence may
        gain."""
        groups = self.groups
        if groups is not None:
            chosen = groups.firsts_np if self.has_drafts else groups.newest_np
            columns = (self.slots_np[chosen], self.generations[chosen], self.positions_np[chosen])
            return Sampled(*columns, self.are_bounds)
        return Sampled(self.slots_np, self.generations, self.positions_np, self.are_bounds)

    @property
    def num_newer(self) -> Int64s:
        """[R] number of later samples of the same sequence; 0 for the last one."""
        if self.groups is None:
            return np.zeros(self.slots_np.size, np.int64)
        return self.groups.num_newer_np

    @property
    def earlier(self) -> Int64s:
        """Indices of the samples whose rows have tokens from the sample's position on."""
        if self.are_replayed:
            return np.arange(self.slots_np.size)
        return np.flatnonzero(self.num_newer)

    def following(self, inputs: Tensor) -> "SampleRows":
        """Return the samples of a step with drafts, once its tokens are known. inputs: int64 [R],
        the token that each sample follows."""
        groups = self.groups
        assert groups is not None, "a step with drafts"
        drafted = Drafted(groups.num_before_np, groups.num_before, inputs)
        return self._replace(drafted=drafted)

    def newest(self) -> "SampleRows":
        """Return the last samples of sequences, [Q], without padding."""
        groups = self.groups
        if groups is None:
            return self.without_padding()
        return self._choose(groups.newest_np, groups.newest, self.used)

    def newest_of(self, column: Tensor) -> Tensor:
        """Return the entries [Q] of a column [>= R] for the last samples of sequences."""
        if self.groups is not None:
            return column.index_select(0, self.groups.newest)
        return column[: self.slots_np.size]

    def keep(self, chosen: Int64s, used: int) -> "SampleRows":
        """Return these samples only, in separate columns. chosen [R'] int64: their indices,
        ascending; used: the bits of the parts that their rows use."""
        if not self.slots.shape[0]:  # the step failed before it had any columns
            return self._choose(chosen, None, used)
        return self._choose(chosen, upload(chosen, self.slots.device), used)

    def _choose(self, chosen: Int64s, on_device: Tensor | None, used: int) -> "SampleRows":
        columns = (self.slots, self.token_indices, self.positions)
        if on_device is not None:
            columns = (columns[0][on_device], columns[1][on_device], columns[2][on_device])
        slots, groups = self.slots_np[chosen], self.groups
        if groups is not None:
            device = self.slots.device if groups.firsts.shape[0] else None
            repeats = bool((slots[1:] == slots[:-1]).any())
            groups = group_samples(slots, device) if repeats else None
        return SampleRows(
            slots,
            self.generations[chosen],
            self.positions_np[chosen],
            used | self.used & BY_LOGITS,
            *columns,
            None,
            self.are_bounds,
            given=tuple(self.given[place] for place in chosen.tolist())
            if groups is not None and self.given
            else (),
            has_drafts=self.has_drafts and groups is not None,
            groups=groups,
            are_replayed=self.are_replayed,
        )

    def without_padding(self) -> "SampleRows":
        """Return the same rows, with device columns cut to [R]."""
        count = self.slots_np.size
        return self._replace(
            slots=self.slots[:count],
            token_indices=self.token_indices[:count],
            positions=self.positions[:count],
        )


def replayed_rows(
    slot: int, first: int, count: int, given: Int32s, device: torch.device
) -> SampleRows:
    """Return the samples at `count` positions of a row, from `first` on, as if its tokens ended
    before each. given: its tokens, those at the positions included."""
    positions = np.arange(first, first + count, dtype=np.int32)
    slots = np.full(count, slot, np.int64)
    return SampleRows(
        slots,
        np.zeros(count, np.int64),
        positions,
        0,
        upload(slots.astype(np.int32), device),
        upload(np.zeros(count, np.int32), device),
        upload(positions, device),
        None,
        given=(given,) * count,
        groups=group_samples(slots, None),
        are_replayed=True,
    )


class Outcome(NamedTuple):
    """The outcome of a step's drafts, by its program, with padding: see
    StepColumns.num_verified."""

    verified: Verified
    drafts: Tensor | None
    """int64 [Q, K] the rows' next drafts, which they have; None if the program makes none."""


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
    outcome: Outcome | None = None
    """Set by the last stage's program in steps that may have drafts."""

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
    skips_drafts: bool = False
    """See ScheduledStep."""

    def keep(self, kept: Int64s, used: int) -> "Unsampled":
        """Return a copy of these rows only, without reports, which no later step overwrites. kept
        int64 [R'] indexes the rows; used: the bits of the parts that these use."""
        chosen = None if self.chosen is None else self.chosen.keep(kept)
        return self._replace(rows=self.rows.keep(kept, used), chosen=chosen, reports=())

    def take(self, taken: Int64s, used: int, later: StepExtensions) -> "Unsampled":
        """Return these rows only, without reports, to be sampled now. taken int64 [R'] indexes the
        rows; used: as for keep; later: extensions of the message that samples them, if it is
        another."""
        rows, step_values = self.rows.keep(taken, used), self.step_values.with_those_of(later)
        chosen = self.chosen
        if chosen is not None and taken.size < self.rows.slots_np.size:
            chosen = chosen.keep(taken, by_logits=bool(rows.used | step_values.used))
        return self._replace(rows=rows, chosen=chosen, step_values=step_values, reports=())
