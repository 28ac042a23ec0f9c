"""The weights of a group, for callers: updates in place and reloads, and which version the ranks
have. Whether that is complete: weights_state.py. Requests that run on: recomputing.py. Adapters:
lora_update.py. Files: saving.py."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.config import WorkerConfig
from rpc_schema.errors import WorkerError
from rpc_schema.identity import first_difference
from worker_client.errors import config_error
from worker_client.group.failure_state import Change, FailureState, WeightsGone
from worker_client.group.group_channel import GroupChannel
from worker_client.group.lora_update import LoraUpdate
from worker_client.group.loras import GroupAdapter, GroupLoras
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.recomputing import Recomputation, Recomputed, check_budget
from worker_client.group.running import RunningRequests
from worker_client.group.saving import save_set
from worker_client.group.waiting import Waiter
from worker_client.group.weights_state import (
    WeightsVersion,
    common_version,
    given_up,
    learned,
    next_number,
)
from worker_client.scheduler_output import SchedulerOutput
from worker_client.wire.worker_client import TensorList

SHARD_PATTERN: Final = "model-rank-{rank}-part-{part}.safetensors"
SHARD_MAX_SIZE_BYTES: Final = 5 << 30

TRANSFER_SLACK_S: Final = 30.0
"""Time between a rank's timeout for a trainer and ours."""

Target: TypeAlias = Literal["model", "draft_model"] | GroupAdapter
"""Weights that an update changes: of the model, of the one that drafts for it, or an adapter's."""


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
        self.config: WorkerConfig | None = None
        """Configuration of the ranks since the last reload, which names its files; None: there was
        none."""
        self.on_version: Callable[[WeightsVersion], None] | None = None
        """Called with each new version before a step can run with it; must not call the group. The
        newest driver of the group sets it."""
        self.planned: Callable[[], SchedulerOutput | None] | None = None
        """Returns the step that this driver has planned and not sent."""
        self.recomputation = Recomputation(channel, steps, state, waiter)
        """The running requests whose KV is to be computed again."""
        self._keeps_rows = False
        """The latest update, open or not, keeps requests."""
        self._adapter: LoraUpdate | None = None
        """The latest update, if it is of an adapter."""

    @property
    def recomputed(self) -> Recomputed | None:
        """The work of the last update or reload with `recompute`, so far; None: there was none, or
        no row was left to recompute after a failure."""
        return self.recomputation.report

    def learn(self, statuses: Sequence[lc.Status]) -> None:
        """Note what the ranks hold: steps are refused unless all have complete weights of one
        version."""
        self._state.apply(learned(statuses))
        found = common_version(statuses)
        if found is None or found == self.version:
            return
        if self.version is not None:
            self._steps.slots.leave_weights(self._planned_step() if self._keeps_rows else None)
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
            so many tokens (of each replica in lockstep) are recomputed before each step; requests
            can be stepped once their own KV is complete. None: finish_update() recomputes all.

        Raises:
            ConfigError: the version is not larger than that of every rank, or the model cannot be
                updated, or there is no such draft model or adapter; or requests cannot be
                recomputed, since layers keep a state per request; or recompute_budget is not a
                positive number, or `running` is not `recompute`. Nothing has changed, but for
                requests that are lost.
        """
        in_place = not isinstance(target, GroupAdapter)
        check_budget(recompute_budget, running, is_in_place=in_place)
        self._adapter = None
        if isinstance(target, GroupAdapter):
            update = LoraUpdate(self._channel, self._loras, target, running)
            update.start(format, partial=partial, version=version)
            self._adapter = update
            return
        if target != "model" and running != "drop":
            problem, fix = "requests go on while a draft model is updated", "leave it out"
            raise config_error("running", running, problem, fix)
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
        if self._adapter is not None and self._adapter.is_open:
            return self._adapter.finish()
        replies = self._channel.ask(wt.FinishWeightUpdate)
        self.learn(self._channel.daemons.get_status())
        self.recomputation.begin(self._planned_step())
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
        check_budget(recompute_budget, running)
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
        statuses = self._channel.daemons.get_status()
        self.learn(statuses)
        self.config = statuses[0].config
        self.recomputation.begin(self._planned_step())
        return replies

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
        one step. Of replicas in lockstep, only the first one's do, unless experts are shared. After
        a rank's error only the old set is left; the next save removes files of a dead rank. No
        group may load the set meanwhile. pattern names the files, by {rank} and {part};
        max_size_bytes bounds each.

        Raises:
            ConfigError: no daemon option --save-root, or not the same one, or the name or the
                pattern is not allowed.
            CapacityError: the disk is full.
            ContentMismatchError: ranks hold different weights.
        """
        return save_set(
            self._channel,
            partial(lc.SaveShardedState, name=name, pattern=pattern, max_size_bytes=max_size_bytes),
        )

    def save_tensorized_model(self, name: str) -> list[lc.SaveTensorizedModelReply]:
        """Save like save_sharded_state, through the tensorizer library, which the daemons must have
        (`pip install "worker-daemon[tensorizer]"`): one file per rank, for
        load_format="tensorizer".

        Raises: as save_sharded_state does, and
            ConfigError: a daemon does not have the library.
        """
        return save_set(self._channel, partial(lc.SaveTensorizedModel, name=name))

    def _next_version(self, version: int | None, target: wt.UpdateTarget = "model") -> int:
        """Return the number of the version that an update makes: larger than that of any rank, and
        than any that this driver has seen."""
        self._channel.check_usable()
        statuses = self._channel.daemons.get_status()
        if target == "draft_model":
            held = [each.draft_weights for each in statuses]
            known = [0]
        else:
            held = [each.weights for each in statuses]
            known = [0 if self.version is None else self.version.number]
        known += [each.version for each in held if each is not None]
        return next_number(known, version)

    def _give_up(self, cause: str, running: RunningRequests, budget: int | None) -> wt.RunningRows:
        """Mark the weights incomplete, once no step is in flight, and drop all rows unless they are
        kept: no step may run on weights that are being replaced. Return what ranks do with the
        rows."""
        self._waiter.wait_for_all()
        self._keeps_rows = running in ("keep", "recompute")
        if not self._keeps_rows:
            self._steps.lose_rows("the weights were replaced", aborts=running == "abort")
        self.recomputation.expect(running, budget)
        self._state.apply(given_up(cause))
        return "drop" if running == "abort" else running

    def _learn_refused(self) -> None:
        """Note what the ranks hold after they have refused an update. If all of them have, steps
        can run, and requests go on as before."""
        self.learn(self._channel.daemons.get_status())
        if not self._state.weights_cause:
            self.recomputation.cancel()

    def _planned_step(self) -> SchedulerOutput | None:
        return None if self.planned is None else self.planned()
