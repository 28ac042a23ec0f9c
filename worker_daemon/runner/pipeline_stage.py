"""Runs one of several pipeline stages: receives hidden states from the previous stage, sends its
own to the next one, and takes part in the return of sampled tokens. Every rank makes the same
exchanges in the same order, even if the step fails on one of them.

Shapes: N tokens, H hidden size. Status is an int64 scalar on the device
(distributed/pp.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.distributed.bubbles import InputWaits
from worker_daemon.distributed.pp import (
    STATUS_FAILED,
    STATUS_OK,
    StageArrival,
    StageInbound,
    StageOutbound,
)
from worker_daemon.distributed.tokens import TokenBroadcast
from worker_daemon.runner.input_batch import InputBuilder, StepInputs
from worker_daemon.runner.output import PendingOutput, ReplyIdentity, StepReplies
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.sample_rows import Unsampled
from worker_daemon.runner.scheduled_step import ScheduledStep
from worker_daemon.runner.stage_program import StageProgram
from worker_daemon.runner.step_sampler import StepSampler

_NO_SLOTS: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The exchanges of one stage over one link."""

    inbound: StageInbound | None
    """None on the first stage."""
    outbound: StageOutbound | None
    """None on the last stage."""
    tokens: TokenBroadcast


@dataclass(slots=True)
class _Due:
    """The exchanges of the current request that the other stages still expect."""

    slots: Int64s
    """Rows whose tokens are to be returned."""
    has_drafts: bool = False
    """True if some of their tokens are drafts."""
    skips_drafts: bool = False
    """True if no drafts come with the tokens."""
    seq: int = 0
    num_tokens: int = 0
    sends: bool = False
    """True if hidden states are to be sent."""
    arrival: StageArrival | None = None
    """Hidden states being received, if any."""
    is_torn: bool = False
    """True if an exchange has begun and not ended."""


class PipelineStage:
    """One of several pipeline stages, on one link. Used on the step thread only. A new link
    brings a new one."""

    def __init__(
        self,
        state: RequestState,
        inputs: InputBuilder,
        neighbours: Neighbours,
        waits: InputWaits,
        sampler: StepSampler | None,
        replies: StepReplies,
        no_hidden: Tensor,
    ) -> None:
        """sampler: None on stages but the last. no_hidden: zeros [1, H] in the model's dtype, sent
        in place of a failed step's output."""
        self._state = state
        self._inputs = inputs
        self._neighbours = neighbours
        self._waits = waits
        self._sampler = sampler
        self.replies = replies
        self._no_hidden = no_hidden
        self._ok = torch.full((), STATUS_OK, dtype=torch.int64, device=no_hidden.device)
        self._failed = torch.full_like(self._ok, STATUS_FAILED)
        self._num_published = 0
        self._published = np.full(state.limits.max_num_seqs + 1, -1, np.int64)
        """For each row, the publication (tokens.py) that brings its newest token."""
        self._due = _Due(_NO_SLOTS)

    def forward(self, program: StageProgram, step: ScheduledStep) -> Unsampled:
        """Receive, compute and send."""
        due = self._begin(step)
        inputs = self._inputs.build(step)
        with self._waits.waiting():
            hidden, status = self._receive(due, inputs)
        output = program.run(inputs, hidden)
        self._send(due, output.hidden, self._failed if self._state.has_failed else status)
        if inputs.missing is not None:
            self._inputs.catch_up(inputs, inputs.missing)
        last = self._sampler
        reports = () if last is None else last.report_forward(step, output.hidden)
        rows, values = inputs.sample_rows, step.step_values
        return Unsampled(rows, output.chosen, status, values, reports, step.skips_drafts)

    def sample(self, step: Unsampled, identity: ReplyIdentity) -> PendingOutput | None:
        """Sample and return the tokens to the other stages, or start to receive them."""
        rows, count = step.rows, step.rows.slots_np.size
        if not count:
            return self.replies.without_tokens(identity, step.status, step.reports)
        slots = rows.newest_of(rows.slots)
        counted = rows.has_drafts or self._state.parts.any_may_refuse(rows.used)
        if self._sampler is None:
            self._publish(slots, None, counted=counted)
            return None
        sampled = self._sampler.sample(step)
        tokens = self._sampler.following(rows, sampled)
        if self._sampler.drafter is not None and sampled.total is None:
            # It, or those who read its drafts, read them. Refusals have been written with them.
            self._inputs.tables.last_sampled[slots.long()] = tokens
        drafts = self._sampler.draft(step, sampled)
        if drafts is not None:
            tokens = torch.cat((tokens.reshape(-1, slots.shape[0]), drafts.T))
        self._publish(slots, tokens, counted=counted)
        return self.replies.of_tokens(identity, rows, sampled, step.status)

    def sample_later(
        self, slots: Int64s, take: Callable[[], Unsampled], identity: ReplyIdentity
    ) -> PendingOutput | None:
        """Sample rows that a step has deferred."""
        self._due = _Due(slots)
        step = take()
        self._due.has_drafts = step.rows.has_drafts
        self._due.skips_drafts = step.skips_drafts
        if step.chosen is None:
            self.give_up()
            return None
        return self.sample(step, identity)

    def give_up(self) -> bool:
        """Make the remaining exchanges of a failed request, without a result. Return False if one
        has begun and not ended: the ranks are out of step.

        Raises:
            CommError: a neighbor is gone.
        """
        due = self._due
        if due.is_torn:
            return False
        if due.arrival is not None:
            arrival, due.arrival = due.arrival, None
            arrival.wait()
        if due.sends:
            self._send(due, self._no_hidden.expand(due.num_tokens, -1), self._failed)
        if due.slots.size:
            slots = upload(due.slots, self._failed.device)
            parts = self._state.parts
            counted = due.has_drafts or parts.any_may_refuse(parts.used_by(due.slots))
            drafted = not due.skips_drafts
            shape = self._neighbours.tokens.shape(due.slots.size, counted=counted, drafted=drafted)
            zeros = None if self._sampler is None else slots.new_zeros(shape)
            self._publish(slots, zeros, counted=counted)
        return True

    def settle(self) -> None:
        """Wait for transfers from and to the neighbors, before buffers are freed.

        Raises:
            CommError: a neighbor is gone.
        """
        if self._neighbours.outbound is not None:
            self._neighbours.outbound.settle()
        self._neighbours.tokens.settle()

    def _begin(self, step: ScheduledStep) -> _Due:
        """Record a step's exchanges, and start to receive before anything else."""
        samples = step.num_samples > 0
        if step.deferred is not None:
            samples &= ~step.deferred
        sends = self._neighbours.outbound is not None
        num_tokens = step.total_num_tokens
        has_drafts = step.drafts is not None and bool((step.num_samples[samples] > 1).any())
        self._due = due = _Due(
            step.slots[samples], has_drafts, step.skips_drafts, step.seq, num_tokens, sends
        )
        if self._neighbours.inbound is not None:
            due.is_torn = True
            due.arrival = self._neighbours.inbound.post(due.num_tokens, due.seq)
            due.is_torn = False
        return due

    def _receive(self, due: _Due, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Return (hidden [N, H], or [0, H] on the first stage; status), once the tokens and counts
        that the step reads are there too."""
        arrival = due.arrival
        if arrival is None or inputs.sample_rows.are_bounds:
            newest = int(self._published[inputs.reads].max(initial=-1))
            self._neighbours.tokens.collect(newest)
        due.arrival = None
        return (self._no_hidden[:0], self._ok) if arrival is None else arrival.wait()

    def _send(self, due: _Due, hidden: Tensor, status: Tensor) -> None:
        if self._neighbours.outbound is None:
            return
        due.is_torn = True
        self._neighbours.outbound.send(hidden, due.num_tokens, status, due.seq)
        due.is_torn = due.sends = False

    def _publish(self, slots: Tensor, tokens: Tensor | None, *, counted: bool) -> None:
        due = self._due
        self._num_published += 1
        self._published[due.slots] = self._num_published
        due.is_torn = True
        self._neighbours.tokens.publish(
            self._num_published, slots, tokens, counted=counted, drafted=not due.skips_drafts
        )
        due.is_torn, due.slots = False, _NO_SLOTS
