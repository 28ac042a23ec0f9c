"""THE hot path: one step from the driver's message to sampled tokens. Everything optional is a part
chosen once, elsewhere.

Dummy, profile and warm-up steps come through the same entry (see warmup.py). Used on the step
thread only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.operations import StepMessage
from rpc_schema.step import ExecuteDummyBatch, ExecuteModel, SampleTokens
from worker_daemon.device.failures import drop_scratch, typed_device_error
from worker_daemon.device.pinned import upload
from worker_daemon.distributed.bubbles import InputWaits
from worker_daemon.distributed.pp import STATUS_FAILED, Outbound
from worker_daemon.distributed.tokens import TokenReturn
from worker_daemon.errors import CommError, DeviceError, OutOfMemoryError
from worker_daemon.raising import raise_caused
from worker_daemon.runner.adoption import Page, describe_requests
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.output import ReplyIdentity
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import Int64s, ScheduledStep, StepExtensions
from worker_daemon.runner.stage_ends import Entering, PendingOutput, StageEntry, StageExit
from worker_daemon.runner.stage_program import EagerProgram, SamplingInputs, StageProgram
from worker_daemon.runner.token_history import TokenHistory


@dataclass(frozen=True, slots=True)
class StageEnds:
    """How this stage is tied to its neighbours; a new link brings new ones."""

    entry: StageEntry
    exit: StageExit
    outbound: Outbound
    tokens: TokenReturn


@dataclass(frozen=True, slots=True)
class _Unsampled:
    """What a step with deferred sampling leaves behind."""

    chosen: SamplingInputs
    rows: SampleRows
    status: Tensor
    brought: StepExtensions


class ModelRunner:
    """Runs steps on one stage and shard. Owned by the worker; freed by reset."""

    def __init__(
        self,
        eager: EagerProgram,
        state: RequestState,
        inputs: InputBuilder,
        ends: StageEnds,
        *,
        no_hidden: Tensor,
        rank: int,
        tp_size: int,
        num_ranks: int,
        waits: InputWaits,
        history: TokenHistory,
    ) -> None:
        """eager: runs steps until `use`; no_hidden: zeros [1, H] in the model's dtype, sent on in
        place of what a failed step computed."""
        self.state = state
        self.inputs = inputs
        self.eager = eager
        self._program: StageProgram = eager
        self._ends = ends
        self._no_hidden = no_hidden
        self._rank = rank
        self._tp_size = tp_size
        self._num_ranks = num_ranks
        self._waits = waits
        self.history = history
        """Of results; outlives a link."""
        device = inputs.tables.device
        self._failed = torch.full((), STATUS_FAILED, dtype=torch.int64, device=device)
        self._publications = 0
        self._unsampled: dict[int, _Unsampled] = {}

    @property
    def waits(self) -> InputWaits:
        """What measures the stage's waits for its input; it holds nothing of the runner."""
        return self._waits

    def use(self, program: StageProgram) -> None:
        """Run steps by another program from here on, as once graphs are captured."""
        self._program = program

    def tie(self, ends: StageEnds) -> None:
        """Use a new link's stage ends from here on."""
        self._ends = ends

    def settle(self) -> None:
        """Wait for what is on its way from and to the neighbours, before buffers are given up.

        Raises:
            CommError: a neighbour is gone.
        """
        self._ends.outbound.settle()
        self._ends.tokens.settle()

    def forget_requests(self) -> None:
        """Free every row, and whatever waits to be sampled."""
        self.state.drop_all()
        self._unsampled.clear()

    def adopt_requests(self, first_slot: int) -> Page:
        """Take back what is not known to have ended well, and describe rows from first_slot on."""
        self.inputs.tables.restore(self.state.take_back(self.history.has_confirmed))
        return describe_requests(self.state, self.inputs, self.history, first_slot)

    def execute_model(self, request: ExecuteModel, arrays: Sequence[Frame]) -> PendingOutput | None:
        """Run one step: apply the scheduler's difference, then receive, forward, send, sample.

        Returns the reply on the output rank, None elsewhere.

        Raises:
            InvalidStepError: refused, on every rank alike; nothing was applied.
            PrecededByError: an earlier step failed; this one ran only to keep the ranks in step.
            CommError: the link is broken.
        """
        step = self.state.apply(request, arrays)
        if request.resync is not None:
            self._unsampled.clear()
        return self._run(step, self._identify(request))

    def execute_dummy_batch(self, request: ExecuteDummyBatch) -> PendingOutput | None:
        """Run one token through the stage, on behalf of no request."""
        return self._run(self.state.dummy_step(request.seq), self._identify(request))

    def sample_tokens(self, request: SampleTokens, arrays: Sequence[Frame]) -> PendingOutput | None:
        """Sample a step that deferred it. Requests that have finished in between are left out.
        Where a feature has an extension here and in the step, this one counts.

        Raises:
            InvalidStepError: no such step waits, or an extension does not fit.
        """
        brought = self.state.parts.judge_step(request.extensions, arrays, self.state.limits)
        self.state.take_unsampled(request.step_seq)
        waiting = self._unsampled.pop(request.step_seq, None)
        if waiting is None:  # its step broke the link before there was anything to sample
            self.state.raise_if_failed()
        assert waiting is not None, "a step that did not fail has left its hidden states"
        kept = np.flatnonzero(
            self.state.are_current(waiting.rows.slots_np, waiting.rows.generations)
        )
        try:
            rows = waiting.rows.keep(kept)
            chosen = waiting.chosen.keep(kept)
            brought = waiting.brought.with_those_of(brought)
        except Exception as error:
            kept_slots, used = waiting.rows.slots_np[kept], waiting.rows.used
            raise_caused(
                self._failed_at(
                    request.seq, error, lambda: self._bring_no_tokens(kept_slots, used)
                ),
                error,
            )
        try:
            reply = self._sample(chosen, rows, waiting.status, brought, self._identify(request))
        except Exception as error:
            raise_caused(self._failed_at(request.seq, error), error)
        self.state.raise_if_failed()
        return reply

    def _run(self, step: ScheduledStep, identity: ReplyIdentity) -> PendingOutput | None:
        try:
            entering = self._ends.entry.post(step.total_num_tokens, step.seq)
        except Exception as error:
            raise_caused(self._out_of_step(step.seq, error), error)
        try:
            inputs = self.inputs.build(step)
            with self._waits.waiting():
                arrived, status = entering.wait(inputs)
            output = self._program.run(inputs, arrived)
            chosen, rows = _hold(step, output.chosen, inputs.sample_rows)
        except Exception as error:
            raise_caused(
                self._failed_at(step.seq, error, lambda: self._give_up(step, entering)), error
            )
        try:
            self._ends.outbound.send(
                output.hidden, inputs.num_tokens, self._status_to_send(status), step.seq
            )
        except Exception as error:
            raise_caused(self._out_of_step(step.seq, error), error)
        try:
            reply = self._finish(step, chosen, rows, status, identity)
        except Exception as error:
            raise_caused(self._failed_at(step.seq, error), error)
        self.state.raise_if_failed()
        return reply

    def _finish(
        self,
        step: ScheduledStep,
        chosen: SamplingInputs,
        rows: SampleRows,
        status: Tensor,
        identity: ReplyIdentity,
    ) -> PendingOutput | None:
        if step.defer_sampling:
            self._unsampled[step.seq] = _Unsampled(chosen, rows, status, step.brought)
            return self._ends.exit.reply_without_tokens(status, identity)
        return self._sample(chosen, rows, status, step.brought, identity)

    def _sample(
        self,
        chosen: SamplingInputs,
        rows: SampleRows,
        status: Tensor,
        brought: StepExtensions,
        identity: ReplyIdentity,
    ) -> PendingOutput | None:
        if not rows.slots_np.size:
            return self._ends.exit.reply_without_tokens(status, identity)
        self._publications += 1
        self.inputs.note_publication(rows.slots_np, self._publications)
        return self._ends.exit.sample(chosen, rows, status, brought, self._publications, identity)

    def _failed_at(
        self, seq: int, error: Exception, settle: Callable[[], None] | None = None
    ) -> Exception:
        """A step failed: settle what the neighbours wait for; return what is to be raised.

        A rank of several in a tensor-parallel stage that fails has left a collective that the
        others are in: that breaks the link. A lost device can settle nothing: the process ends.
        """
        self.state.mark_failed(seq)
        failure = typed_device_error(error)
        if isinstance(failure, CommError | DeviceError):
            return failure
        if isinstance(failure, OutOfMemoryError):
            drop_scratch(error)
        if settle is not None:
            try:
                settle()
            except Exception as second:
                return self._out_of_step(seq, second)
        if self._tp_size > 1:
            return CommError(f"rank {self._rank} left a collective: {failure}")
        return failure

    def _out_of_step(self, seq: int, error: Exception) -> Exception:
        """The neighbours were not sent what they wait for: that breaks the link, if there is
        one."""
        self.state.mark_failed(seq)
        failure = typed_device_error(error)
        if isinstance(failure, CommError | DeviceError):
            return failure
        drop_scratch(error)
        if self._num_ranks > 1:
            return CommError(f"rank {self._rank} left the others waiting: {failure}")
        return failure

    def _give_up(self, step: ScheduledStep, entering: Entering) -> None:
        """Receive and send what the neighbours of a failed step expect, and bring no tokens."""
        entering.discard()
        num_tokens = step.total_num_tokens
        self._ends.outbound.send(self._nothing(num_tokens), num_tokens, self._failed, step.seq)
        rows = self.inputs.lost_rows(step)
        if step.defer_sampling:
            no_tokens = torch.zeros_like(rows.slots).long()
            nothing = SamplingInputs(self._nothing(rows.slots_np.size), no_tokens, no_tokens)
            self._unsampled[step.seq] = _Unsampled(nothing, rows, self._failed, step.brought)
        else:
            self._bring_no_tokens(rows.slots_np, rows.used)

    def _bring_no_tokens(self, slots: Int64s, used: int) -> None:
        """Take part in the return of tokens that this rank cannot sample or use. used: as in
        SampleRows."""
        if slots.size:
            self._publications += 1
            on_device, counted = upload(slots, self._failed.device), self.state.parts.counts(used)
            self._ends.exit.give_up(on_device, self._publications, counted=counted)

    def _nothing(self, num_tokens: int) -> Tensor:
        return self._no_hidden.expand(num_tokens, -1)

    def _status_to_send(self, status: Tensor) -> Tensor:
        return self._failed if self.state.has_failed else status

    def _identify(self, request: StepMessage) -> ReplyIdentity:
        return ReplyIdentity(request.epoch, request.seq, self._rank)


def _hold(
    step: ScheduledStep, chosen: SamplingInputs, rows: SampleRows
) -> tuple[SamplingInputs, SampleRows]:
    """What is sampled in a later step is copied: buffers are this step's alone."""
    return (chosen.clone(), rows.clone()) if step.defer_sampling else (chosen, rows)
