"""The hot path: one step from the driver's message to sampled tokens. Optional features are parts,
chosen once in assemble.py.

Dummy, profile and warm-up steps come through the same entry (see warmup.py). Used on the step
thread only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.errors import CommError, DeviceError, InvalidStepError, PrecededByError
from rpc_schema.operations import StepMessage
from rpc_schema.step import ExecuteDummyBatch, ExecuteModel, SampleTokens
from rpc_schema.weight_transfer import RecomputeRequests
from worker_daemon.contracts.arrays import Bools, Int64s
from worker_daemon.device.failures import drop_scratch, typed_device_error
from worker_daemon.distributed.bubbles import InputWaits
from worker_daemon.distributed.pp import STATUS_OK
from worker_daemon.models.weight_state import WeightState
from worker_daemon.raising import raise_caused
from worker_daemon.runner.adoption import Page, describe_requests
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.output import (
    LoadingOutput,
    PendingOutput,
    ReplyIdentity,
    StepReplies,
)
from worker_daemon.runner.parts.step_parts import SamplerOutput, StepParts
from worker_daemon.runner.recompute import plan_passes, read_replicas, read_rows
from worker_daemon.runner.report import Report
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.sample_rows import Unsampled
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    ScheduledStep,
    StepExtensions,
    TokensOfReplicas,
)
from worker_daemon.runner.shared_experts import SharedExperts
from worker_daemon.runner.stage_program import EagerProgram, StageProgram
from worker_daemon.runner.step_sampler import StepSampler
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.runner.token_versions import RowEnd, TokenVersions


class Stage(Protocol):
    """A stage of the pipeline: SoleStage, or PipelineStage (pipeline_stage.py)."""

    replies: StepReplies
    """Builds this rank's replies."""

    def forward(self, program: StageProgram, step: ScheduledStep) -> Unsampled:
        """Run a step's forward pass, and send its hidden states to the next stage, if there is
        one."""

    def sample(self, step: Unsampled, identity: ReplyIdentity) -> PendingOutput | None:
        """Sample a step's rows. Return the reply on the output rank, None elsewhere."""

    def sample_later(
        self, slots: Int64s, take: Callable[[], Unsampled], identity: ReplyIdentity
    ) -> PendingOutput | None:
        """Sample rows that a step has deferred. slots int64 [R']; take: returns these rows."""

    def give_up(self) -> bool:
        """Make the exchanges that other ranks still expect for the current request, which has
        failed. Return False if they are not known: the ranks are out of step."""

    def settle(self) -> None:
        """Wait for transfers from and to other stages."""


class SoleStage:
    """The stage of a model that is not split: it receives and sends nothing."""

    def __init__(
        self,
        inputs: InputBuilder,
        parts: StepParts,
        sampler: StepSampler,
        replies: StepReplies,
        no_hidden: Tensor,
    ) -> None:
        """no_hidden: [0, H], passed in place of received hidden states."""
        self._inputs = inputs
        self._parts = parts
        self._sampler = sampler
        self.replies = replies
        self._no_hidden = no_hidden
        self._ok = torch.full((), STATUS_OK, dtype=torch.int64)  # read only by the host

    def forward(self, program: StageProgram, step: ScheduledStep) -> Unsampled:
        """See Stage."""
        inputs = self._inputs.build(step)
        output = program.run(inputs, self._no_hidden)
        if inputs.missing is not None:
            self._inputs.catch_up(inputs, inputs.missing)
        reports: tuple[Report, ...] = ()
        if step.pooling is not None or self._parts.has_reports_of_forward:
            reports = self._sampler.report_forward(step, output.hidden)
        return Unsampled(
            inputs.sample_rows,
            output.chosen,
            self._ok,
            step.step_values,
            reports,
            step.skips_drafts,
        )

    def sample(self, step: Unsampled, identity: ReplyIdentity) -> PendingOutput | None:
        """See Stage. The forward pass has already given the rows their most likely tokens: a row
        with several samples any of them, which the newest replaces here, unless the program has
        verified its drafts."""
        rows, count = step.rows, step.rows.slots_np.size
        if not count:
            return self.replies.without_tokens(identity, step.status, step.reports)
        is_greedy = not rows.used | step.step_values.used
        if is_greedy and step.chosen is not None and rows.groups is None:
            sampled = SamplerOutput(step.chosen.greedy[:count], step.reports)
            if rows.delivery is not None and not step.reports:
                reply = self.replies.of_delivery(identity, rows, rows.delivery)
            else:
                reply = self.replies.of_tokens(identity, rows, sampled, step.status)
        elif rows.are_verified and rows.delivery is not None and not step.reports:
            self._sampler.draft_verified(step)
            return self.replies.of_delivery(identity, rows, rows.delivery)
        else:
            sampled = self._sampler.sample(step)
            if sampled.total is None:
                newest = rows.newest_of(rows.slots).long()
                self._inputs.tables.last_sampled[newest] = rows.newest_of(sampled.token_ids)
            reply = self.replies.of_tokens(identity, rows, sampled, step.status)
        if self._sampler.drafter is not None and not step.skips_drafts:
            self._sampler.draft(step, sampled)
        return reply

    def sample_later(
        self, slots: Int64s, take: Callable[[], Unsampled], identity: ReplyIdentity
    ) -> PendingOutput | None:
        """See Stage."""
        step = take()
        return None if step.chosen is None else self.sample(step, identity)

    def give_up(self) -> bool:
        """See Stage: there are no other stages."""
        return True

    def settle(self) -> None:
        """See Stage: there are no other stages."""


class _Deferred(NamedTuple):
    """Rows that a step has left to sample."""

    rows: Unsampled
    weights_version: int
    """Number of the version of the weights that have computed its logits."""


class ModelRunner:
    """Runs the steps of one rank (a stage and a tensor-parallel shard). Owned by the worker; freed
    by reset."""

    def __init__(
        self,
        eager: EagerProgram,
        state: RequestState,
        inputs: InputBuilder,
        stage: Stage,
        weights: WeightState,
        *,
        rank: int,
        tp_size: int,
        num_ranks: int,
        waits: InputWaits | None,
        history: TokenHistory,
        connectors: KVConnectors | None = None,
        shared_experts: SharedExperts | None = None,
    ) -> None:
        """eager: runs steps until `use`; waits: measures the stage's waits for its input, None on a
        sole stage; connectors: move blocks before steps, None if none may move; shared_experts:
        None unless replicas share experts."""
        self.state = state
        self.inputs = inputs
        self.eager = eager
        self.waits = waits
        self.history = history
        """Creates results; outlives a link."""
        self.connectors = connectors
        self._program: StageProgram = eager
        self._stage = stage
        self._weights = weights
        self._rank = rank
        self._tp_size = tp_size
        self._num_ranks = num_ranks
        self._shared_experts = shared_experts
        self._unsampled: dict[int, _Deferred] = {}
        """Rows that steps have deferred, by the step's seq."""
        self._token_versions = TokenVersions()
        self._recomputed: dict[int, RowEnd] = {}
        """By slot, rows whose KV was computed again in place, and how far."""
        self._stale: dict[int, int] = {}
        """Generations of the rows whose KV is to be computed again before they go on, by slot."""

    def use(self, program: StageProgram) -> None:
        """Run steps with another program from now on, such as captured graphs."""
        self._program = program

    @contextmanager
    def using(self, program: StageProgram) -> Iterator[None]:
        """Run the steps of the block with another program."""
        before, self._program = self._program, program
        try:
            yield
        finally:
            self._program = before

    @contextmanager
    def computing_nothing(self) -> Iterator[None]:
        """Run steps in the block that no driver has sent: see RequestState.computing_nothing. Their
        drafts are not counted."""
        with self.state.computing_nothing(), self._stage.replies.uncounted():
            yield

    def rebind_stage(self, stage: Stage) -> None:
        """Use a new link's stage from now on. Drafts begin anew: the ranks may have been at
        different steps, and one of them may be new, but all must verify the same drafts."""
        self._stage = stage
        self.inputs.restart_drafts()

    def settle(self) -> None:
        """Wait for transfers from and to the neighbors, before buffers are freed.

        Raises:
            CommError: a neighbor is gone.
        """
        self._stage.settle()

    def forget_requests(self) -> None:
        """Free every row, and drop steps that wait to be sampled."""
        self.state.drop_all()
        self.inputs.forget_requests()
        self._unsampled.clear()
        self._token_versions.forget()
        self._recomputed.clear()
        self._stale.clear()

    def weights_changed(self, before: int) -> None:
        """Note that other weights compute the rows from now on. before: number of the version that
        has computed them so far, and that has still to sample the rows which steps have
        deferred."""
        state, ends = self.state, {}
        for slot in np.flatnonzero(state.counts.live).tolist():
            known, generation = int(state.num_known_tokens[slot]), int(state.generation[slot])
            known = max(known, self.history.known_to(slot, generation, known))
            ends[slot] = RowEnd(slot, generation, known)
        for (rows, *_), _version in self._unsampled.values():
            here = rows.slots_np[state.are_current(rows.slots_np, rows.generations)]
            for slot, count in zip(*map(np.ndarray.tolist, np.unique_counts(here)), strict=True):
                num_left = count if rows.has_drafts else 1
                ends[slot] = ends[slot]._replace(end=ends[slot].end + num_left)
        self._token_versions.end(before, ends.values())

    def await_recompute(self) -> None:
        """Note that the present rows go on once recompute_requests has computed their KV again.
        Another driver finds no KV of those of which it has not."""
        live = np.flatnonzero(self.state.counts.live)
        self._stale = dict(zip(live.tolist(), self.state.generation[live].tolist(), strict=True))

    def recompute_requests(
        self, request: RecomputeRequests, begin: Callable[[int], None]
    ) -> tuple[int, int]:
        """Compute KV of rows again with the present weights. Return the numbers of tokens and of
        forward passes, once the output rank has the last one's outcome; on other ranks the device
        may not be done. Between passes nothing waits for the device. If replicas share experts, the
        passes are those of the replica that has the most. begin: called with their number, before
        the first.

        Raises:
            InvalidStepError: the message does not fit the rows; nothing was done.
            PrecededByError: a step has failed before; likewise.
            CommError: the link is broken, if only since a pass has failed on one of several ranks.
        """
        state, shared = self.state, self._shared_experts is not None
        of_replicas = read_replicas(request, state)
        if not shared:
            of_replicas = []
        try:
            state.check_failure()
            rows = read_rows(request, state)
        except (InvalidStepError, PrecededByError):
            self._stand_in(of_replicas)
            raise
        passes = list(plan_passes(request.seq, rows, request.max_num_tokens))
        num_passes = max(len(passes), len(of_replicas))
        identity = self._identify(request)
        replies = []
        begin(num_passes)
        with state.knowing(rows.tokens):
            for place, (step, tokens) in enumerate(zip_longest(passes, of_replicas), 1):
                if step is None:
                    self._stand_in([tokens])
                    continue
                try:
                    replies.append(self._run(step, identity, tokens))
                except (CommError, DeviceError):
                    raise
                except Exception as error:
                    if (self._num_ranks == 1 and not shared) or place == num_passes:
                        raise
                    left = f"rank {self._rank} failed in pass {place} of {num_passes}: {error}"
                    raise_caused(CommError(left), error)
        for reply in replies:
            if reply is not None:
                reply.result()
        ends = [*zip(rows.slots.tolist(), rows.ends.tolist(), strict=True)]
        for slot, end in ends[: -1 if request.is_cut else None]:
            self._stale.pop(slot, None)
            self._recomputed[slot] = RowEnd(slot, int(state.generation[slot]), end)
        return sum(step.total_num_tokens for step in passes), num_passes

    def _stand_in(self, passes: Sequence[TokensOfReplicas]) -> None:
        """Take part in forward passes in which this replica computes nothing. passes: the tokens of
        each replica in each; none unless replicas share experts."""
        if self._shared_experts is not None:
            for tokens in passes:
                self._shared_experts.stand_in(self.inputs.size_of_all(tokens))

    def end_epoch(self) -> None:
        """Keep the notes of blocks' contents that hold for another driver, and only the tokens of
        rows whose KV was to be computed again."""
        state = self.state
        state.give_up_kv(self._stale)
        self._stale.clear()
        last_good = state.last_good_seq(self.history.has_confirmed)
        state.contents.end_epoch(last_good)
        state.host_contents.end_epoch(last_good)

    def before_relink(self, epoch: int) -> None:
        """Forget the contents of all blocks if a step of the epoch may have been cut off on the
        device."""
        state, has_confirmed = self.state, self.history.has_confirmed
        if not state.have_all_ended_well(epoch, has_confirmed):
            state.contents.forget()
            state.host_contents.fail(state.last_good_seq(has_confirmed) + 1)

    def adopt_requests(self, first_slot: int) -> Page:
        """Roll back steps that are not known to have succeeded, and describe rows from first_slot
        on."""
        self.inputs.tables.restore(self.state.take_back(self.history.has_confirmed))
        return describe_requests(
            self.state,
            self.inputs,
            self.history,
            first_slot,
            self._weights.version,
            self._token_versions,
            self._recomputed,
        )

    def execute_model(self, request: ExecuteModel, arrays: Sequence[Frame]) -> PendingOutput | None:
        """Run one step: apply the scheduler's changes, then receive, forward, send, sample.

        Returns the reply on the output rank, None elsewhere.

        Raises:
            InvalidStepError: refused on every rank; nothing was applied.
            PrecededByError: an earlier step failed; this one ran only to keep the ranks in step.
            CommError: the link is broken.
        """
        try:
            step = self.state.apply(request, arrays)
        except InvalidStepError:
            if self.state.tokens_of_replicas is not None:
                self._stand_in([self.state.tokens_of_replicas])
            raise
        if request.resync is not None:
            self._unsampled.clear()
        shares = self._shared_experts is not None
        of_replicas = self.state.tokens_of_replicas if shares else None
        return self._run(step, self._identify(request), of_replicas)

    def execute_dummy_batch(self, request: ExecuteDummyBatch) -> PendingOutput | None:
        """Run one token through the stage, without a request."""
        return self._run(self.state.dummy_step(request.seq), self._identify(request))

    def _run(
        self,
        step: ScheduledStep,
        identity: ReplyIdentity,
        of_replicas: TokensOfReplicas | None = None,
    ) -> PendingOutput | None:
        """of_replicas: tokens of each; None: they compute the same step, as in a warm-up."""
        if self._shared_experts is not None:
            own = step.total_num_tokens
            tokens = of_replicas or TokensOfReplicas((own,), own == step.slots.size)
            step = step._replace(shared_size=self.inputs.size_of_all(tokens))
            has_all_layers = of_replicas is not None
            self._shared_experts.begin(step.shared_size, has_all_layers=has_all_layers)
        connectors, loaded, program, storing = self.connectors, None, self._program, None
        try:
            if connectors is not None and (step.step_values.data or connectors.beside.is_loading):
                loaded = connectors.begin(step)
                storing = connectors.store_in_step(step)
                if storing is not None and storing.watches_layers:
                    program = program.watched(storing.layer_written)
            computed = self._stage.forward(program, step)
            if step.deferred is not None:
                later = np.repeat(step.deferred, step.num_samples)
                computed = self._defer(step.seq, computed, later)
            reply = self._stage.sample(computed, identity)
            if storing is not None:
                storing.end()
        except Exception as error:
            if step.deferred is not None:
                lost = self.inputs.lost(step, step.deferred)
                self._unsampled[step.seq] = _Deferred(lost, self._weights.version)
            raise_caused(self._failure(step.seq, error), error)
        self.state.raise_if_failed()
        if connectors is None or (loaded is None and not connectors.beside.is_loading):
            return reply
        if reply is None:
            connectors.beside.take_known()  # this rank tells nobody
            return None
        return LoadingOutput(reply, loaded, connectors.beside)

    def _defer(self, seq: int, step: Unsampled, later: Bools) -> Unsampled:
        """Keep samples of a step for SampleTokens, and return the others. later [R]: True for those
        to keep."""
        parts, slots = self.state.parts, step.rows.slots_np
        kept, now = np.flatnonzero(later), np.flatnonzero(~later)
        rows = step.keep(kept, parts.used_by(slots[kept]))
        self._unsampled[seq] = _Deferred(rows, self._weights.version)
        rest = step.take(now, parts.used_by(slots[now]), NO_STEP_VALUES)
        return rest._replace(reports=step.reports)

    def _take_deferred(
        self, seq: int, slots: Int64s, left: Int64s, step_values: StepExtensions
    ) -> Unsampled:
        """Return rows that a step has deferred, to be sampled now. Unless these are all, they and
        those that are left become copies, and the rest is freed before the rows are sampled."""
        (step, version), parts = self._unsampled[seq], self.state.parts
        if left.size:
            kept = np.flatnonzero(np.isin(step.rows.slots_np, left))
            self._unsampled[seq] = _Deferred(step.keep(kept, parts.used_by(left)), version)
        else:
            del self._unsampled[seq]
        taken = np.flatnonzero(np.isin(step.rows.slots_np, slots))
        return step.take(taken, parts.used_by(slots), step_values)

    def find_deferred(self, seq: int) -> Unsampled | None:
        """Return the rows that wait to be sampled since a step; None: there are none."""
        deferred = self._unsampled.get(seq)
        return None if deferred is None else deferred.rows

    def sample_tokens(self, request: SampleTokens, arrays: Sequence[Frame]) -> PendingOutput | None:
        """Sample rows that a step has deferred. Requests that have finished in between are left
        out. If a feature has an extension here and in the step, this one counts.

        Raises:
            InvalidStepError: no such rows wait, or an extension does not fit.
        """
        state, seq = self.state, request.step_seq
        step_values = state.parts.check_later(request.extensions, arrays, state.limits)
        slots, left = state.take_unsampled(seq, request.slots, step_values)
        identity = self._identify(request)
        if seq in self._unsampled:
            identity = identity._replace(weights_version=self._unsampled[seq].weights_version)
        try:
            take = partial(self._take_deferred, seq, slots, left, step_values)
            reply = self._stage.sample_later(slots, take, identity)
        except Exception as error:
            raise_caused(self._failure(request.seq, error), error)
        state.raise_if_failed()
        return reply

    def _failure(self, seq: int, error: Exception) -> Exception:
        """Send the other ranks what they wait for, and return the error to raise for a failed
        request.

        Two failures break the link: that of one rank of a tensor-parallel stage, whose peers are
        still in a collective, and that of a rank within an exchange. If the device is lost, nothing
        can be sent: the process ends. If replicas share experts, the only rank of a stage makes the
        exchanges that those of other replicas expect.
        """
        self.state.mark_failed(seq)
        failure = typed_device_error(error)
        if isinstance(failure, CommError | DeviceError):
            return failure
        drop_scratch(error)
        try:
            in_step = self._finish_experts() and self._stage.give_up()
        except Exception as second:
            failure, in_step = typed_device_error(second), False
            if isinstance(failure, CommError | DeviceError):
                return failure
            drop_scratch(second)
        if not in_step:
            return CommError(f"rank {self._rank} left the others waiting: {failure}")
        if self._tp_size > 1:
            return CommError(f"rank {self._rank} left a collective: {failure}")
        return failure

    def _finish_experts(self) -> bool:
        """Return False if other replicas wait for this rank's experts in vain."""
        if self._shared_experts is None or self._tp_size > 1:
            return True  # with tensor parallelism, the failure breaks the link
        return self._shared_experts.finish()

    def _identify(self, request: StepMessage) -> ReplyIdentity:
        return ReplyIdentity(request.epoch, request.seq, self._rank, self._weights.version)
