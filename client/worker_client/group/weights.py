"""The weights of a group: updates in place, reloads, checksums and saves. weights_state.py says
whether the ranks' weights are complete, and of one model."""

import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.errors import (
    ConfigError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.identity import first_difference
from worker_client.errors import (
    DeadlineExceeded,
    config_error,
)
from worker_client.group.failure_state import Change, FailureState, WeightsGone
from worker_client.group.group_channel import GroupChannel
from worker_client.group.loras import GroupAdapter, GroupLoras
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.recomputing import Recomputation, Recomputed
from worker_client.group.running import RunningRequests
from worker_client.group.waiting import Waiter
from worker_client.group.weights_state import (
    WeightsVersion,
    check_same_weights,
    common_version,
    given_up,
    learned,
)
from worker_client.scheduler_output import SchedulerOutput
from worker_client.wire.worker_client import TensorList

SHARD_PATTERN: Final = "model-rank-{rank}-part-{part}.safetensors"
SHARD_MAX_SIZE_BYTES: Final = 5 << 30

TRANSFER_SLACK_S: Final = 30.0
"""Time between a rank's timeout for a trainer and ours."""

MAX_VERSION: Final = 2**63 - 1
"""Largest number of a version."""

Target: TypeAlias = Literal["model", "draft_model"] | GroupAdapter
"""Weights that an update changes: of the model, of the one that drafts for it, or an adapter's."""

ReplyT = TypeVar("ReplyT", bound=StepReply)


class GroupWeights:
    """`WorkerGroup.weights`. Belongs to the group's thread."""

    def __init__(
        self,
        channel: GroupChannel,
        steps: StepsInFlight,
        state: FailureState,
        waiter: Waiter,
        loras: GroupLoras,
    ) -> None:
        self._channel = channel
        self._loras = loras
        self._steps = steps
        self._state = state
        self._waiter = waiter
        self.version: WeightsVersion | None = None
        """Version of the weights when all ranks were last known to have the same ones, and all of
        them. None before they are loaded."""
        self.on_version: Callable[[WeightsVersion], None] | None = None
        """Called with each new version before a step can run with it; must not call the group. The
        newest driver of the group sets it."""
        self.on_recomputed: Callable[[], None] | None = None
        """Called once the KV of all running requests is of the newest version. Otherwise like
        on_version."""
        self.on_recomputing: Callable[[Collection[str]], None] | None = None
        """Called with the requests that still wait to be recomputed, when these change other than
        by steps. Otherwise like on_version."""
        self.planned: Callable[[], SchedulerOutput | None] | None = None
        """Returns the step that this driver has planned and not sent."""
        self._recomputation = Recomputation(channel, steps, state, waiter)
        self._keeps_rows = False
        """The latest update, open or not, keeps requests."""
        self._must_recompute = False
        """Requests that are kept are to be recomputed once the weights are complete."""
        self._budget: int | None = None
        """Most tokens that are then recomputed between two steps; None: all before the first."""
        self._adapter: tuple[GroupAdapter, RunningRequests] | None = None
        """The adapter that the open update is of, if it is of one."""

    @property
    def recomputed(self) -> Recomputed | None:
        """The work of the last update or reload with `recompute`, so far; None: there was none, or
        no row was left to recompute after a failure."""
        return self._recomputation.report

    @property
    def is_recomputing(self) -> bool:
        """True while requests are recomputed between steps, or will be once the weights are
        complete: recompute_next() goes on with that."""
        return self._recomputation.is_open or (self._must_recompute and self._budget is not None)

    def learn(self, statuses: Sequence[lc.Status]) -> None:
        """Note what the ranks hold: steps are refused unless all have complete weights of one
        version."""
        self._state.apply(learned(statuses))
        found = common_version(statuses)
        if found is None or found == self.version:
            return
        if self.version is not None:
            planned = self.planned() if self._keeps_rows and self.planned is not None else None
            self._steps.slots.leave_weights(planned)
        self.version = found
        if self.on_version is not None:
            self.on_version(found)

    def learn_replaced(self, statuses: Sequence[lc.Status]) -> None:
        """Note what the ranks hold after some were replaced. If that is another model than before,
        since nobody is left who had it, steps are refused too."""
        known, found = self.version, common_version(statuses)
        both = [None if each is None else each.identity for each in (known, found)]
        if known is None or first_difference(both) is None:
            self.learn(statuses)
        else:
            lost = f"version {known.number} of the weights is lost with the ranks that had it"
            self._state.apply(given_up(lost))

    def init_transfer_engine(
        self, engine: wt.Engine, timeout_s: float = 60.0
    ) -> list[wt.InitWeightTransferEngineReply]:
        """Choose the source of the weights of later updates, on every rank. With broadcasts: wait
        for the trainer, which must come at the same time (`worker_client.trainer` has one).

        timeout_s: how long a rank waits for the trainer here, and later for its next data.

        Raises:
            TransferError: the trainer has not connected.
            ConfigError: the engine is not for this group. The daemons continue to serve,
                without an engine.
        """
        return self._channel.ask(
            partial(
                wt.InitWeightTransferEngine,
                engine=engine,
                timeout_ms=max(100, int(timeout_s * 1000)),
            ),
            timeout_s=timeout_s + TRANSFER_SLACK_S,
        )

    def start_update(
        self,
        format: wt.WeightFormat = "checkpoint",
        *,
        partial: bool = False,
        version: int | None = None,
        target: Target = "model",
        running: RunningRequests = "drop",
        recompute_budget: int | None = None,
    ) -> None:
        """Open an update on every rank, once the steps in flight are over. No step can be sent
        until finish_update() or reload(). Cached prefixes belong to the old weights: `Driver` tells
        its scheduler of the new version (VersionedScheduler).

        format: `checkpoint`, tensors as in the checkpoint, or `kernel`, as the ranks hold them.
        partial: tensors that are not sent stay as they are.
        version: number of the version that the update makes; None: one more than before.
        target: `draft_model` updates the model that drafts; `running` must be left as it is. An
            adapter (`group.loras.known`) is updated as a whole by finish_update(), with PEFT's
            names; until then, and if the update fails, it stays as it was. Both have versions of
            their own; other requests go on, and steps can be sent.
        running: what happens to running requests. `drop`: they are lost; the next step's failure
            names them. `keep`: they go on with the KV that they have, all ranks with the new
            weights from the same step on. They are held, not lost, if the update fails, until one
            with `keep` is complete. KV that is lost later is computed again by the newest weights.
            `recompute`: as `keep`, but finish_update() computes their KV again, all of it by the
            new weights (docs/weights.md). `abort`: they are lost for good
            (StepFailed.aborted_req_ids): `Driver` returns their outputs with the tokens so far. Of
            an adapter: those that use it, and its driver's scheduler does it, without a failure
            (AdaptingScheduler).
        recompute_budget: with `recompute`: finish_update() computes nothing again. Instead, at most
            so many tokens are recomputed before each step; requests can be stepped once their own
            KV is complete. None: finish_update() recomputes all.

        Raises:
            ConfigError: the version is not larger than that of every rank, or the model cannot be
                updated, or there is no such draft model or adapter; or requests cannot be
                recomputed, since layers keep a state per request, or replicas are in lockstep; or
                recompute_budget is not a positive number, or `running` is not `recompute`. Nothing
                has changed, but for requests that are lost.
        """
        _check_budget(recompute_budget, running, target)
        self._adapter = None
        if isinstance(target, GroupAdapter):
            self._start_adapter(self._loras.find(target), format, partial, version, running)
            return
        if target != "model" and running != "drop":
            problem, fix = "requests go on while a draft model is updated", "leave it out"
            raise config_error("running", running, problem, fix)
        self._check_recomputes(running)
        number = self._next_version(version, target)
        rows: wt.RunningRows = "drop"
        if target == "model":
            rows = self._give_up("a weight update is open", running, recompute_budget)
        else:
            self._waiter.wait_for_all()
        try:
            self._channel.ask(
                lambda **ids: wt.StartWeightUpdate(
                    format=format,
                    partial=partial,
                    version=number,
                    target=target,
                    running=rows,
                    **ids,
                )
            )
        except WorkerError:
            self._learn_refused()
            raise

    def _start_adapter(
        self,
        adapter: GroupAdapter,
        format: wt.WeightFormat,
        partial: bool,
        version: int | None,
        running: RunningRequests,
    ) -> None:
        """Open an update of an adapter; steps in flight go on."""
        self._channel.check_usable()
        number = _next_number([adapter.weights_version], version)
        self._channel.ask(
            lambda **ids: wt.StartWeightUpdate(
                format=format,
                partial=partial,
                version=number,
                target="lora",
                lora_id=adapter.lora_id,
                running="keep",
                **ids,
            )
        )
        self._adapter = adapter, running

    def update(self, tensors: TensorList, source: wt.Source) -> list[wt.UpdateWeightsReply]:
        """Update tensors on every rank, from the engine's source. A trainer's broadcasts must run
        at the same time as this call: it returns once they are complete.

        Raises:
            ConfigError: the model has no such tensors; nothing was taken, and the update is
                still open.
            CheckpointError: files are missing or truncated; likewise.
            TransferError: the trainer is lost. The weights are dirty: restart with
                init_transfer_engine and start_update, or reload. An adapter is as it was.
        """
        return self._channel.ask(partial(wt.UpdateWeights, **tensors._asdict(), source=source))

    def finish_update(self) -> list[wt.FinishWeightUpdateReply]:
        """Close the update on every rank, and recompute requests if it was started so, without a
        budget: steps can be sent again.

        Raises:
            ConfigError: tensors are missing; the update is still open.
            StateError: the adapter was removed or replaced meanwhile.
            ContentMismatchError: only some ranks have finished an adapter's update. It was removed.
        """
        if self._adapter is not None:
            return self._finish_adapter(*self._adapter)
        replies = self._channel.ask(wt.FinishWeightUpdate)
        self.learn(self._statuses())
        self._recompute()
        return replies

    def _finish_adapter(
        self, adapter: GroupAdapter, running: RunningRequests
    ) -> list[wt.FinishWeightUpdateReply]:
        try:
            replies = self._channel.ask(wt.FinishWeightUpdate)
        except ConfigError:
            raise  # all ranks refuse, before any of them changes the adapter
        except WorkerError:
            self._adapter = None
            with contextlib.suppress(WorkerDaemonError):  # if ranks differ now, it is removed
                self._loras.learn()
            raise
        self._adapter = None
        self._loras.updated(adapter, running)
        return replies

    def reload(
        self,
        model: str = "",
        *,
        version: int | None = None,
        running: RunningRequests = "drop",
        recompute_budget: int | None = None,
    ) -> list[wt.ReloadWeightsReply]:
        """Read the weights again on every rank, in place, from `model` or from their previous
        source. Completes dirty weights. version, running, recompute_budget: as in start_update().

        Raises:
            ConfigError: the directory lies outside the daemons' roots, or holds another
                model; or the version is not larger than that of every rank; or requests cannot be
                kept, since the KV cache is in FP8 and its scales would change; or they cannot be
                recomputed, as in start_update().
            CheckpointError: a file is missing, truncated or not of this model.
        """
        _check_budget(recompute_budget, running)
        self._check_recomputes(running)
        version = self._next_version(version)
        before = self._state.weights_cause
        cause = "reload_weights has failed on some rank"
        rows = self._give_up(cause, running, recompute_budget)
        build = partial(wt.ReloadWeights, model=model, version=version, running=rows)
        try:
            replies = self._channel.ask(build)
        except WorkerError:
            self._state.apply(WeightsGone(before) if before else Change.WEIGHTS_FILLED)
            if not before:  # usually refused before the first byte
                self._learn_refused()
            raise
        self.learn(self._statuses())
        self._recompute()
        return replies

    def recompute_next(self) -> None:
        """Recompute requests, as many tokens as the budget allows. `Driver` calls it before each
        step while is_recomputing; execute_model() does for the requests of a step that wait. If a
        rank fails, all requests are lost; if a step has failed, those that wait.

        Raises: as WorkerGroup.execute_model does, but for InvalidSchedulerOutput.
        """
        are_of_one_version = self._recomputation.advance()
        self._tell_waiting()
        if are_of_one_version and self.on_recomputed is not None:
            self.on_recomputed()

    def recompute_for(self, output: SchedulerOutput) -> None:
        """Recompute the requests that a step is to compute, and those before them, as
        recompute_next() does."""
        try:
            scheduled = {*output.decode_req_ids, *output.num_scheduled_tokens}
        except TypeError:  # it is malformed, and will be refused
            return
        while not scheduled.isdisjoint(self._steps.slots.stale):
            self.recompute_next()

    def update_config(self, overrides: Mapping[str, str | int | bool]) -> None:
        """Change what the next reload() reads, on every rank: `model.model`, `model.seed`,
        `load.load_format`, `load.verify_checksums`.

        Raises:
            ConfigError: a field is not one of these, or its value is not allowed.
        """
        self._channel.ask(partial(wt.UpdateConfig, overrides=dict(overrides)))

    def compute_checksums(self) -> list[lc.ComputeWeightChecksumsReply]:
        """Hash every rank's current weights, tensor by tensor."""
        return self._channel.ask(lc.ComputeWeightChecksums)

    def save_sharded_state(
        self,
        name: str,
        pattern: str = SHARD_PATTERN,
        max_size_bytes: int = SHARD_MAX_SIZE_BYTES,
    ) -> list[lc.SaveShardedStateReply]:
        """Save the group's weights as the set `name` under the daemons' save root, which they must
        share; load it with load_format="sharded_state".

        All ranks write at once, next to an existing set of that name; rank 0 then replaces it in
        one step. After a rank's error only the old set is left; the next save removes files of a
        dead rank. No group may load the set meanwhile. pattern names the files, by {rank} and
        {part}; max_size_bytes bounds each.

        Raises:
            ConfigError: no daemon option --save-root, or not the same one, or the name or the
                pattern is not allowed.
            CapacityError: the disk is full.
            ContentMismatchError: ranks hold different weights.
        """
        return self._save(
            partial(lc.SaveShardedState, name=name, pattern=pattern, max_size_bytes=max_size_bytes)
        )

    def save_tensorized_model(self, name: str) -> list[lc.SaveTensorizedModelReply]:
        """Save like save_sharded_state, through the tensorizer library, which the daemons must have
        (`pip install "worker-daemon[tensorizer]"`): one file per rank, for
        load_format="tensorizer".

        Raises: as save_sharded_state does, and
            ConfigError: a daemon does not have the library.
        """
        return self._save(partial(lc.SaveTensorizedModel, name=name))

    def _next_version(self, version: int | None, target: wt.UpdateTarget = "model") -> int:
        """Return the number of the version that an update makes: larger than that of any rank, and
        than any that this driver has seen."""
        self._channel.check_usable()
        statuses = self._statuses()
        if target == "draft_model":
            held = [each.draft_weights for each in statuses]
            known = [0]
        else:
            held = [each.weights for each in statuses]
            known = [0 if self.version is None else self.version.number]
        known += [each.version for each in held if each is not None]
        return _next_number(known, version)

    def _check_recomputes(self, running: RunningRequests) -> None:
        """Refuse to recompute requests of replicas in lockstep: each replica's passes would be a
        step of all of them."""
        if running == "recompute" and self._channel.num_replicas > 1:
            problem = "replicas in lockstep cannot recompute requests"
            raise config_error("running", running, problem, "use keep, drop or abort")

    def _give_up(self, cause: str, running: RunningRequests, budget: int | None) -> wt.RunningRows:
        """Mark the weights incomplete, once no step is in flight, and drop all rows unless they are
        kept: no step may run on weights that are being replaced. Return what ranks do with the
        rows."""
        self._waiter.wait_for_all()
        self._keeps_rows = running in ("keep", "recompute")
        if self._keeps_rows:
            self._must_recompute |= running == "recompute" or bool(self._steps.slots.stale)
            if running == "recompute":
                self._budget = budget
        else:
            self._steps.lose_rows("the weights were replaced", aborts=running == "abort")
            self._must_recompute = False
            self._tell_waiting()
        self._state.apply(given_up(cause))
        return "drop" if running == "abort" else running

    def _learn_refused(self) -> None:
        """Note what the ranks hold after they have refused an update. If all of them have, steps
        can run, and requests go on as before."""
        self.learn(self._statuses())
        if not self._state.weights_cause:
            self._must_recompute = False

    def _recompute(self) -> None:
        """Recompute requests, or let them wait for it, if they are to be and the weights are
        complete."""
        if not self._must_recompute or self._state.weights_cause:
            return
        self._must_recompute = False
        planned = None if self.planned is None else self.planned()
        self._recomputation.begin(planned, self._budget)
        self._tell_waiting()
        while self._budget is None and self._recomputation.is_open:
            self.recompute_next()

    def _tell_waiting(self) -> None:
        if self.on_recomputing is not None:
            self.on_recomputing(frozenset(self._steps.slots.stale))

    def _save(self, build: Callable[..., StepRequest[ReplyT]]) -> list[ReplyT]:
        """Have each rank write, and keep the files if all have succeeded; else remove them, as far
        as ranks can be reached. build: returns the request, with the save's id as `save`."""
        statuses = self._statuses()
        config = statuses[0].config
        check_same_weights(statuses, "" if config is None else config.model.model)
        save = secrets.token_bytes(16)
        try:
            replies = self._ask_writers(partial(build, save=save))
        except (WorkerError, DeadlineExceeded):
            self._remove_saved(save)
            raise
        try:
            self._ask_writers(partial(lc.FinishShardedState, save=save, keep=True))
        except WorkerError as error:
            first = self._channel.daemons.ranks[0]
            if error.rank == first:  # otherwise it may be about to move those files into place
                self._remove_saved(save)
            raise
        return replies

    def _ask_writers(self, build: Callable[..., StepRequest[ReplyT]]) -> list[ReplyT]:
        """Have the ranks of one replica do an operation: those in lockstep have the same files."""
        ranks = self._channel.daemons.ranks
        writers = ranks[: len(ranks) // self._channel.num_replicas]

        def build_for(rank: int) -> Callable[..., StepRequest[Any]]:
            return build if rank in writers else lc.GetSupportedTasks

        return self._channel.ask_each(build_for)[: len(writers)]

    def _remove_saved(self, save: bytes) -> None:
        with contextlib.suppress(WorkerDaemonError):  # the next save cleans up as well
            self._ask_writers(partial(lc.FinishShardedState, save=save, keep=False))

    def _statuses(self) -> list[lc.Status]:
        return [client.get_status() for client in self._channel.daemons.clients]


def _check_budget(budget: int | None, running: RunningRequests, target: Target = "model") -> None:
    if budget is None:
        return
    if running != "recompute" or isinstance(target, GroupAdapter):
        problem, fix = "no request is recomputed in place", "leave it out, or use recompute"
        raise config_error("recompute_budget", budget, problem, fix)
    if type(budget) is not int or budget < 1:
        problem = "it is not a positive number of tokens"
        fix = "give 1 or more, or None to recompute all requests at once"
        raise config_error("recompute_budget", budget, problem, fix)


def _next_number(known: Sequence[int], version: int | None) -> int:
    """Return the number of a version: larger than the known ones. Raises ClientConfigError."""
    if version is None:
        return max(known) + 1
    if type(version) is not int or not max(known) < version <= MAX_VERSION:
        problem = f"the weights have version {max(known)} already"
        fix = f"give a number from {max(known) + 1} to {MAX_VERSION}, or None for the next one"
        raise config_error("version", version, problem, fix)
    return version
