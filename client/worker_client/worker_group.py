"""A pipeline x tensor group of daemons as one worker: its typed operations, their order and their
timeouts."""

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rpc_schema import lifecycle as lc
from rpc_schema import lora
from rpc_schema import uploads as up
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests
from rpc_schema.codec import encode_step
from rpc_schema.config import ParallelConfig, WorkerConfig
from rpc_schema.errors import WireError
from rpc_schema.kv_cache import groups_of
from rpc_schema.step import ExecuteDummyBatch, SampleTokens
from worker_client.errors import (
    ClientConfigError,
    ClientError,
    RemoteError,
    TooManyStepsInFlight,
    WorkerDied,
)
from worker_client.group.adoption import AdoptedRequest, RankRow, merge, read_page
from worker_client.group.attaching import LEASE_WAIT_S, Attachment
from worker_client.group.block_notes import BlockNotes
from worker_client.group.failure_state import (
    Answer,
    Change,
    FailureState,
    GroupRequest,
    WeightsGone,
)
from worker_client.group.group_adapters import AddTask, GroupAdapter, GroupAdapters
from worker_client.group.group_channel import LONG_TIMEOUT_S, GroupChannel
from worker_client.group.group_channel import RankProgress as RankProgress
from worker_client.group.load_chain import LoadChain
from worker_client.group.loading import LoadedGroup, Loader, check_config, group_limits
from worker_client.group.outcomes import Failure, StepFuture, StepsInFlight
from worker_client.group.replacement import REPLACE_WITHIN_S, Replacement, ReplacementReport
from worker_client.group.saves import SHARD_MAX_SIZE_BYTES, SHARD_PATTERN, save_weights
from worker_client.group.uploading import (
    HostTensor,
    UploadTask,
    attached_epoch,
    chosen,
    find,
    named_parts,
)
from worker_client.group.weights_state import check_same_weights, given_up, learned
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.cached_blocks import NO_CACHED_BLOCKS, CachedBlocks
from worker_client.steps.masks import named
from worker_client.steps.slots import SlotTable
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.lease import LeaseTerms
from worker_client.wire.liveness import Liveness, LivenessEvent, OnEvent
from worker_client.wire.transport import Endpoint, new_driver_id, parse_endpoint
from worker_client.wire.worker_client import TensorList

CLOSE_WAIT_S = 0.5
"""Wait of close() for steps in flight, so that all ranks are left at the same one."""
NO_MORE_SLOTS = 65535
"""A row number that does not exist."""

TRANSFER_SLACK_S = 30.0
"""Time between a rank's timeout for a trainer and ours."""


class WorkerGroup:
    """Owns the sockets to a group's daemons. Belongs to one thread; close() (or `with`) frees it.

    Order: attach(), prepare(config), then execute_model() as often as wanted.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        parallel: ParallelConfig,
        keys: Keys = NO_KEYS,
        *,
        lease: LeaseTerms | None = None,
    ) -> None:
        """Connect; nothing is sent yet. Endpoint i becomes rank i. keys: ours and the daemons', for
        endpoints that have any. lease: its terms; None: the defaults.

        Raises:
            ClientConfigError: the number of endpoints is not the group's size, or one of them is
                unusable.
        """
        parsed = parse_endpoints(endpoints, parallel, keys)
        self.parallel = parallel
        self.driver_id = new_driver_id()
        self.max_in_flight = parallel.pipeline_parallel_size + 1
        self.output_rank = (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size
        self._state = FailureState(parallel.world_size)
        self._steps = StepsInFlight(self._state, self.output_rank)
        terms = LeaseTerms() if lease is None else lease
        self._channel = GroupChannel(parsed, self.driver_id, self._steps, self._state, terms)
        self._attaching = Attachment(self._channel, self._steps, self._state, terms)
        self.load_chain = LoadChain(self._channel)
        """The operations that prepare() consists of, for callers that want another order."""
        self._adapters = GroupAdapters(self._channel)
        self._notes = BlockNotes(self._channel)
        self.clients = self._channel.daemons.clients
        self._keys = keys
        self._loaded: tuple[WorkerConfig, LoadedGroup] | None = None
        """Result of prepare(): a replacement of a lost daemon loads the same."""

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Detach and close all sockets. The daemons keep their loaded model, and the next driver
        need not wait."""
        try:
            self._leave()
        finally:
            self._channel.close()

    def heartbeat(self) -> None:
        """Record that the application is alive, for LeaseTerms.heartbeat_timeout_s. Any thread may
        call it."""
        self._channel.lease.heartbeat()

    @property
    def world_size(self) -> int:
        """Number of daemons."""
        return len(self.clients)

    @property
    def first_stage_ranks(self) -> range:
        """Ranks that embed prompts."""
        return range(self.parallel.tensor_parallel_size)

    @property
    def num_in_flight(self) -> int:
        """Number of steps whose outcome is unknown; the later sampling of one does not count."""
        return sum(f.step is None or not f.step.is_later for f in self._steps.pending)

    @property
    def slots(self) -> SlotTable:
        """The table of slots; for tests and inspection."""
        return self._steps.slots

    # ------------------------------------------------------------------ attach

    def attach(
        self,
        timeout_s: float | None = None,
        *,
        wait_for_lease_s: float = LEASE_WAIT_S,
        force: bool = False,
        keep_requests: bool = False,
        wait_s: float = 0.0,
    ) -> list[lc.Status]:
        """Attach to all daemons, in two phases, and return their states.

        Requests of earlier drivers are dropped, unless they are to be kept for adopt_requests(). If
        this group was attached before, its own requests are dropped and its steps in flight fail.
        timeout_s bounds all of it; the default is ATTACH_TIMEOUT_S for agreeing, and then the time
        that daemons need to abandon a hanging step.

        If another driver has the lease, this waits for it, at most wait_for_lease_s and only until
        it is certain that the other driver lives. force takes it at once: the other driver's steps
        are refused from then on.

        wait_s: how long to wait first for daemons that are not started, or do not answer,
                yet.

        From here on a thread renews the lease, until close() or detach() gives it back.

        Raises:
            LeaseHeldError: another driver has the lease, and renews it.
            ForbiddenError: force needs the role admin.
            IncompatibleError: a daemon has another protocol version.
            DeadlineExceeded: a daemon does not answer, or its results do not reach this driver.
            WorkerDied: the group has lost a daemon: replace() it, or make a new group.
            NothingListens: no daemon is at an endpoint.
        """
        self._state.check(GroupRequest.ATTACH)
        statuses = self._attaching.attach(
            timeout_s,
            wait_for_lease_s=wait_for_lease_s,
            force=force,
            keep_requests=keep_requests,
            wait_s=wait_s,
        )
        self._state.apply(learned(statuses))
        return statuses

    # ------------------------------------------------------------------ liveness

    @property
    def liveness(self) -> list[Liveness]:
        """Liveness of each rank at the last look: alive, suspect (it does not answer, and may
        recover) or dead."""
        return self._channel.daemons.watch.liveness

    @property
    def liveness_events(self) -> list[LivenessEvent]:
        """Changes of the ranks' liveness, the newest last."""
        return list(self._channel.daemons.watch.events)

    def on_liveness(self, callback: OnEvent) -> None:
        """Call `callback` at each event from now on, on this thread, from within other methods; it
        must not call the group."""
        self._channel.daemons.watch.on_event = callback

    def look(self) -> None:
        """Check that all daemons live. Waiting for results does so every 20 ms; callers with
        nothing to wait for call this.

        Raises:
            WorkerDied: one of them is dead.
        """
        self._channel.check_deaths(0.0)
        self._state.check(GroupRequest.LOOK)

    def replace(
        self, rank: int, endpoint: str | None = None, within_s: float = REPLACE_WITHIN_S
    ) -> ReplacementReport:
        """Replace a lost rank's daemon by the one that answers at `endpoint` within the time, and
        continue. The default is the lost one's own endpoint, for a supervisor that restarts it.

        The new daemon loads its own shard only. The others keep their weights, the memory of the KV
        cache, and graphs without communication. Ranks that are asleep are woken first, for which
        they need memory, and sleep again afterwards; ranks that were reset load too. Requests are
        lost: earlier futures, or the next step, fail with a StepFailed that names them. Ranks that
        die meanwhile are waited for at their own endpoints, REPLACE_ATTEMPTS times in a row.

        Raises:
            ReplacementFailed: no daemon answered, or attempts failed because of another death or
                lack of memory. It may be tried again.
            RemoteError: the new daemon refuses the model or the device.
            ClientError: nothing was loaded that a new daemon could load.
        """
        if self._loaded is None:
            raise ClientError(
                "the group has loaded nothing that a new daemon could load: once the lost daemon "
                "runs again, make a new WorkerGroup, attach() and prepare()"
            )
        self._state.check(GroupRequest.REPLACE)
        config, model = self._loaded
        replacement = Replacement(
            self._channel, self._attaching, self._steps, self._state, config, model
        )
        place = None if endpoint is None else parse_endpoint(endpoint, self._keys)
        replaced = replacement.run(rank, place, within_s)
        self._state.apply(learned(self.get_status()))
        if replaced.loaded_ranks:
            self._adapters.restore(replaced.loaded_ranks)
        return replaced

    def detach(self) -> None:
        """Detach, once the steps in flight are over, or some time has passed; models stay
        loaded."""
        self._finish_steps()
        self._attaching.detach()

    def shutdown(self) -> None:
        """Stop all daemons."""
        for client in self.clients:
            client.shutdown()

    def get_status(self) -> list[lc.Status]:
        """Return every daemon's state."""
        return [client.get_status() for client in self.clients]

    def check_health(self) -> list[lc.CheckHealthReply]:
        """Return every daemon's health."""
        return [client.check_health() for client in self.clients]

    # ------------------------------------------------------------------ load

    def prepare(
        self,
        config: WorkerConfig,
        *,
        num_gpu_blocks: int | None = None,
        fit_max_model_len: bool = False,
        reload: bool = False,
        on_progress: Callable[[RankProgress], None] | None = None,
    ) -> LoadedGroup:
        """Make the group ready to serve `config`; returns at once if it is loaded already. Requests
        are dropped, unless they are adopted next: start with a new scheduler.

        Raises:
            ConfigMismatchError: something else is loaded, and reload is False; names the fields.
            ContentMismatchError: ranks have read different files; names two of them.
            KVPlanError: not one request of max_model_len fits, or more blocks were asked for than
                fit.
            RemoteError: an operation failed; names the first rank that did.
        """
        self._channel.check_usable()
        check_config(config)
        if config.parallel != self.parallel:
            raise ClientConfigError(
                "the configuration is for another group",
                field="config.parallel",
                value=config.parallel,
                fix=f"use the group's own: {self.parallel}",
            )
        self._channel.on_progress = on_progress
        deadline_s = config.scheduler.step_deadline_ms / 1000
        self._channel.links.allow(deadline_s)
        self._drain()
        loader = Loader(
            config,
            num_gpu_blocks,
            fit_max_model_len,
            reload,
            self.load_chain,
            self.output_rank,
            self.needs_relink,
            self.relink,
            self.reset,
            self.reload_weights,
            self.get_status,
        )
        model = loader.load(self.get_status())
        self._channel.links.step_deadline_s = deadline_s
        self._loaded = config, model
        if not model.was_loaded:
            self._state.apply(Change.WEIGHTS_FILLED)
            self._adapters.forget()
        elif config.lora.max_loras:
            self._adapters.learn()
        self._steps.start(config.scheduler.max_num_seqs, group_limits(config, model), deadline_s)
        return model

    def adopt_requests(self) -> list[AdoptedRequest]:
        """Return the requests that an earlier driver has left, as far as all ranks have them; none
        if anything had to be loaded. For a group that has attached with keep_requests and is
        prepared, before its first step. That step drops the requests that it does not admit. A
        request continues when it is admitted as `AdoptedRequest.as_new`, in that step or a later
        one; blocks keep their contents until they are assigned.

        Raises:
            AdoptionMismatch: ranks report different data for a request.
            RemoteError: a rank cannot report; names the first one.
        """
        rows = _read_rows(self._channel)
        kv_cache = self.clients[0].get_status().kv_cache
        assert kv_cache is not None, "legal in READY only"
        return merge(rows, self.output_rank, groups_of(kv_cache))

    @property
    def needs_relink(self) -> bool:
        """True if the ranks must build new communicators before the next step."""
        return self._state.needs_relink

    def relink(self) -> None:
        """Build new communicators on all ranks; weights and KV cache stay, requests do not.

        Tokens may have been in transit between ranks, so no row can be trusted. Running requests
        are lost: the next step fails and names them.

        Raises:
            WorkerDied: a daemon is dead: its neighbors may notice that before its own connection
                ends, so this waits a moment.
        """
        self._channel.check_deaths()
        self._drain()
        self._steps.lose_rows("the group was relinked")
        self.load_chain.relink()
        self._state.apply(Change.LINK_MADE)

    def reset(self, to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]) -> None:
        """Return all ranks to an earlier state of the load chain. Requests are lost as in
        relink()."""
        self._drain()
        self._steps.lose_rows("the group was reset")
        self.load_chain.reset(to)
        if to == "CREATED":
            self._state.apply(Change.LINK_MADE)

    # ------------------------------------------------------------------ weights

    def compute_weight_checksums(self) -> list[lc.ComputeWeightChecksumsReply]:
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
            RemoteConfigError: no daemon option --save-root, or not the same one, or the name or the
                pattern is not allowed.
            RemoteCapacityError: the disk is full.
            ContentMismatchError: ranks hold different weights.
        """
        self._check_same_weights()
        return save_weights(
            self._channel,
            partial(lc.SaveShardedState, name=name, pattern=pattern, max_size_bytes=max_size_bytes),
        )

    def save_tensorized_model(self, name: str) -> list[lc.SaveTensorizedModelReply]:
        """Save like save_sharded_state, through the tensorizer library, which the daemons must have
        (`pip install "worker-daemon[tensorizer]"`): one file per rank, for
        load_format="tensorizer".

        Raises: as save_sharded_state does, and
            RemoteConfigError: a daemon does not have the library.
        """
        self._check_same_weights()
        return save_weights(self._channel, partial(lc.SaveTensorizedModel, name=name))

    def _check_same_weights(self) -> None:
        loaded = self._loaded
        check_same_weights(self.get_status(), "" if loaded is None else loaded[0].model.model)

    # ------------------------------------------------------------------ sleep

    def sleep(self, level: lc.SleepLevel = 1) -> list[lc.MemoryTagsReply]:
        """Release the memory of weights and KV cache on every rank; addresses stay. Level 1 keeps
        the weights in host memory, level 2 keeps nothing: they must be loaded again after wake_up.
        Repeating it changes nothing.

        Requests are lost as in relink(), and blocks have no contents any more: a scheduler must
        forget its cached prefixes.

        Raises:
            RemoteCapacityError: a host has no room for the weights. That rank is as it was; others
                may sleep: call wake_up, or sleep again.
            RemoteConfigError: the model was loaded without enable_sleep_mode.
        """
        self._drain()
        self._steps.lose_cache("the group was put to sleep")
        return self._channel.ask(partial(lc.Sleep, level=level))

    def wake_up(self, tags: Sequence[lc.MemoryTag] | None = None) -> list[lc.MemoryTagsReply]:
        """Allocate the memory of tags again on every rank, by default of all; in any order. Steps
        are refused until both are awake. Repeating it changes nothing.

        Raises:
            RemoteCapacityError: a device has not that much left. That rank stays asleep; others may
                be awake: call it again once there is memory, or sleep.
            RemoteConfigError: as sleep() does.
        """
        wanted = None if tags is None else tuple(tags)
        return self._channel.ask(partial(lc.WakeUp, tags=wanted))

    def discard(self, tags: Sequence[lc.MemoryTag]) -> list[lc.MemoryTagsReply]:
        """Release the memory of tags on every rank, awake or asleep, and keep nothing of it. With
        the KV cache, requests are lost as in sleep().

        Raises:
            RemoteConfigError: as sleep() does.
        """
        self._drain()
        if "kv_cache" in tags:
            self._steps.lose_cache("the group's KV cache was discarded")
        return self._channel.ask(partial(lc.Discard, tags=tuple(tags)))

    # ------------------------------------------------------------------ weights

    def init_weight_transfer_engine(
        self, engine: wt.Engine, timeout_s: float = 60.0
    ) -> list[wt.InitWeightTransferEngineReply]:
        """Choose the source of the weights of later updates, on every rank. With broadcasts: wait
        for the trainer, which must come at the same time (`worker_client.trainer` has one).

        timeout_s: how long a rank waits for the trainer here, and later for its next data.

        Raises:
            WeightTransferError: the trainer has not connected.
            RemoteConfigError: the engine is not for this group. The daemons continue to serve,
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

    def start_weight_update(
        self, format: wt.WeightFormat = "checkpoint", *, partial: bool = False
    ) -> None:
        """Open an update on every rank. No step can be sent until finish_weight_update() or
        reload_weights(). Running requests are lost, and the next step's failure names them. A
        scheduler must forget its cached prefixes: they belong to the old weights.

        format: `checkpoint`, tensors as in the checkpoint, or `kernel`, as the ranks hold them.
        partial: tensors that are not sent stay as they are.
        """
        self._give_up_weights("a weight update is open")
        self._channel.ask(lambda **ids: wt.StartWeightUpdate(format=format, partial=partial, **ids))

    def update_weights(self, tensors: TensorList, source: wt.Source) -> list[wt.UpdateWeightsReply]:
        """Update tensors on every rank, from the engine's source. A trainer's broadcasts must run
        at the same time as this call: it returns once they are complete.

        Raises:
            RemoteConfigError: the model has no such tensors; nothing was taken, and the update is
                still open.
            RemoteCheckpointError: files are missing or truncated; likewise.
            WeightTransferError: the trainer is lost. The weights are dirty: begin again with
                init_weight_transfer_engine and start_weight_update, or reload_weights.
        """
        return self._channel.ask(partial(wt.UpdateWeights, **tensors._asdict(), source=source))

    def finish_weight_update(self) -> list[wt.FinishWeightUpdateReply]:
        """Close the update on every rank: steps can be sent again.

        Raises:
            RemoteConfigError: tensors are missing; the update is still open.
        """
        replies = self._channel.ask(wt.FinishWeightUpdate)
        self._state.apply(learned(self.get_status()))
        return replies

    def reload_weights(self, model: str = "") -> list[wt.ReloadWeightsReply]:
        """Read the weights again on every rank, in place, from `model` or from their previous
        source; requests are lost as in start_weight_update(). Completes dirty weights.

        Raises:
            RemoteConfigError: the directory lies outside the daemons' roots, or holds another
                model.
            RemoteCheckpointError: a file is missing, truncated or not of this model.
        """
        before = self._state.weights_cause
        self._give_up_weights("reload_weights has failed on some rank")
        try:
            replies = self._channel.ask(partial(wt.ReloadWeights, model=model))
        except RemoteError:
            self._state.apply(WeightsGone(before) if before else Change.WEIGHTS_FILLED)
            if not before:  # usually refused before the first byte
                self._state.apply(learned(self.get_status()))
            raise
        self._state.apply(learned(self.get_status()))
        return replies

    def update_config(self, overrides: Mapping[str, str | int | bool]) -> None:
        """Change what the next reload_weights() reads, on every rank: `model.model`, `model.seed`,
        `load.load_format`, `load.verify_checksums`.

        Raises:
            RemoteConfigError: a field is not one of these, or its value is not allowed.
        """
        self._channel.ask(partial(wt.UpdateConfig, overrides=dict(overrides)))

    def _give_up_weights(self, cause: str) -> None:
        """Mark the weights incomplete and drop all rows: no step may run on weights that are being
        replaced, nor on their KV cache."""
        self._drain()
        self._steps.lose_cache("the weights were replaced")
        self._state.apply(given_up(cause))

    # ------------------------------------------------------------------ LoRA adapters

    @property
    def loras(self) -> Mapping[int, GroupAdapter]:
        """The adapters that all ranks have, by id."""
        return self._adapters.known

    def add_lora(
        self, name: str, lora_id: int | None = None, *, load_inplace: bool = False
    ) -> GroupAdapter:
        """Put an adapter below the daemons' --lora-root into every rank's host memory, and return
        it: requests name it by its `extension`. Daemons keep running steps, but this call blocks
        until it is loaded: a serving driver uses begin_add_lora.

        lora_id: by default its current ID, or a free one. An adapter that is already in host memory
        only counts as used, unless load_inplace replaces it. The least recently used adapter is
        evicted if there is no room: see `loras`.

        Raises:
            RemoteConfigError: it is not supported, or exceeds max_lora_rank; the model was loaded
                without adapters; the id or the name belongs to another one.
            RemoteCheckpointError: its files are missing or faulty.
            RemoteCapacityError: all adapters are pinned. Whatever is raised, nothing has changed.
        """
        return self.begin_add_lora(name, lora_id, load_inplace=load_inplace).finish()

    def begin_add_lora(
        self, name: str, lora_id: int | None = None, *, load_inplace: bool = False
    ) -> AddTask:
        """Begin to add an adapter: call its proceed() between steps, until that returns False."""
        return self._adapters.begin(name, lora_id, load_inplace=load_inplace)

    def remove_lora(self, lora_id: int) -> bool:
        """Remove an adapter from host memory; running requests keep using it. Return False if there
        was none of that id."""
        return self._adapters.remove(lora_id)

    def list_loras(self) -> list[lora.ListLorasReply]:
        """Return every rank's adapters in host memory, least recently used first."""
        return self._adapters.reports()

    def pin_lora(self, lora_id: int) -> None:
        """Pin an adapter: it is never evicted. Raises RemoteConfigError if there is none of that
        id."""
        self._adapters.pin(lora_id)

    # ------------------------------------------------------------------ uploads

    def upload(
        self, tensors: Sequence[HostTensor], ranks: Sequence[int] | None = None
    ) -> list[bytes]:
        """Put tensors into the host memory of ranks (by default all), and return the content hashes
        that steps name them by. Tensors that are there already are not sent. Daemons run steps
        meanwhile, but this returns only when all is there: while it serves requests, a driver calls
        begin_upload instead.

        They stay until drop_uploads(), a reset() or the end of the lease: after attach() and
        replace(), upload them again. attach(keep_requests=True) keeps those that requests name.

        Raises:
            RemoteCapacityError: a daemon has no room. Tensors that others have received stay.
            IllegalStateError: no model is loaded.
            ClientError: uploads were dropped meanwhile, by a reset.
        """
        return self.begin_upload(tensors, ranks).finish()

    def begin_upload(
        self, tensors: Sequence[HostTensor], ranks: Sequence[int] | None = None
    ) -> UploadTask:
        """Begin an upload, to be sent chunk by chunk: call its proceed() between steps, until that
        returns False."""
        return UploadTask(self._channel, tensors, ranks)

    def find_uploads(
        self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None
    ) -> list[bool]:
        """Return, for each tensor, True if all of these ranks have it completely."""
        epoch = attached_epoch(self._channel)
        found = [find(client, epoch, content_hashes) for client in chosen(self._channel, ranks)]
        return [all(on_rank[name] for on_rank in found) for name in content_hashes]

    def drop_uploads(
        self, content_hashes: Sequence[bytes], ranks: Sequence[int] | None = None
    ) -> None:
        """Have ranks forget tensors, also incomplete ones. A step that uses one keeps it until it
        is done. Unknown hashes are no error."""
        epoch = attached_epoch(self._channel)
        for client in chosen(self._channel, ranks):
            for part in named_parts(content_hashes):
                client.ask(partial(up.DropUploads, epoch=epoch, content_hashes=part))

    # ------------------------------------------------------------------ cached blocks

    def note_cached_blocks(
        self,
        tag: bytes,
        blocks: CachedBlocks,
        after: StepFuture,
        *,
        distrusted: Sequence[int] = (),
    ) -> bool:
        """Have all ranks note the contents of full blocks, for cached_blocks() of the next driver;
        does not wait. Return False, with nothing sent, while ranks have not answered earlier notes:
        try again later.

        tag: at most 64 bytes that identify how the hashes were made, with everything that decides a
        block's contents and is not hashed. Notes of another tag replace all others. A hash has at
        most 64 bytes, and names the KV group of its block, if there are several.
        after: a step of execute_model. Once it and those before it have run, the blocks have these
        contents. Pass one whose result has arrived: for a step that failed, or one of an earlier
        attach, nothing is noted. Later steps may already have given the blocks to other requests:
        ranks allow for that, however late the note arrives.
        distrusted: blocks whose earlier notes are to be dropped.

        Blocks that a running request still has to fill, and those that have lost their contents by
        new weights or sleep, are left out.

        Raises:
            ClientConfigError: a block does not exist, or a field is out of bounds. Nothing was
                sent.
        """
        if self._notes.are_pending:
            return False
        chosen_blocks = self._steps.slots.with_contents(blocks)
        if after.failure is not None or after.epoch != self._channel.epoch:
            chosen_blocks = NO_CACHED_BLOCKS  # seqs of another epoch would mean other steps
        self._notes.send(tag, chosen_blocks, after.seq, distrusted)
        return True

    def cached_blocks(self, tag: bytes) -> CachedBlocks:
        """Return the blocks with known contents on every rank, as noted by this driver and by
        earlier ones; none if their tag is another. A daemon that was started or loaded since has
        none. For a driver that has prepared the group and not yet sent a step.

        A request may begin with such a block as with any that was filled before.

        Raises:
            RemoteError: a rank refuses; names the first one.
        """
        return self._notes.read(tag)

    # ------------------------------------------------------------------ profiles

    def profile(
        self,
        action: Literal["start", "stop"],
        prefix: str = "",
        kind: Literal["torch", "cuda"] = "torch",
    ) -> list[lc.ProfileReply]:
        """Begin or end a profile of every rank; ending one of kind torch writes a trace for each
        rank. After an error some ranks may record: stop ends that, and does not fail on the others.

        prefix names the traces; without one they have the previous names, and replace those files.

        Raises:
            IllegalStateError: a profile runs already, or one of the other kind.
            RemoteConfigError: the prefix is not a plain name, or traces cannot be written.
            RemoteCapacityError: the disk is full.
        """
        return self._channel.ask(
            partial(lc.Profile, action=action, kind=kind, prefix=prefix),
            timeout_s=LONG_TIMEOUT_S,  # a trace may take minutes to write
        )

    # ------------------------------------------------------------------ steps

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        """Send a step to every rank. After a failure the step is sent in full, over a new link if
        need be.

        If a failure has not been reported by any result(), the returned future fails with it, and
        the requests of `output` are lost too: the scheduler planned the step before it knew of the
        failure. The same holds if relinking fails.

        Raises:
            TooManyStepsInFlight: pipeline size + 1 steps are in flight.
            InvalidSchedulerOutput: the output breaks a rule; nothing was sent.
            WorkerDied: the group is unusable.
            WeightsNotWhole: a weight update is open, or has failed; nothing was sent.
            DrainingError: an operator drains this group; nothing was sent.
        """
        if not self._channel.takes_steps_at_once:
            self._channel.check_usable()
            self._channel.check_serving()
            failure = self._unreported_failure()
            if failure is not None:
                failure.lost |= self._steps.slots.fail([output])
                return self._refuse(failure)
        self._check_credit()
        began_ns = time.monotonic_ns()
        ids = self._channel.next_ids()
        step = self._steps.slots.encode(output, epoch=ids.epoch, link=ids.link, seq=ids.seq)
        future = self._steps.expect(self, ids.epoch, ids.seq, step)
        self._channel.send_step(ids, step.frames, stands_alone=step.resync)
        self._steps.times.sent(ids.seq, began_ns, output)
        return future

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Give up a step that execute_model did not send. Every row is dropped, since the step may
        have been meant to change any of them; return the ids that lost theirs, and those that the
        step names. The next step is sent in full."""
        return self._steps.slots.withdraw(output)

    def sample_tokens(
        self,
        deferred: StepFuture,
        masks: Mapping[str, NDArray[np.int32]] | None = None,
        req_ids: Collection[str] | None = None,
    ) -> StepFuture:
        """Sample requests that a step has deferred: req_ids, some of those that are left, or None
        for all. It counts as part of its step: any number may be in flight.

        masks: for some of these, int32 [ceil(vocab_size / 32)], bit 1 = allowed. Requests that have
        finished since, and their masks, are left out.

        Raises: as execute_model does, and
            InvalidSchedulerOutput: the step has not deferred a request, or it was sampled, or masks
            differ in length; nothing was sent.
            TooLargeError: the masks do not fit into a message; nothing was sent.
        """
        self._channel.check_usable()
        failure = deferred.failure or self._steps.unreported_failure
        if failure is not None:
            return self._refuse(failure)
        step = deferred.step
        if step is None or not step.deferred:
            raise ClientError(f"step {deferred.seq} did not defer its sampling")
        began_ns, slots = time.monotonic_ns(), self._steps.slots
        chosen, sampling = slots.encode_later(step, masks or {}, req_ids)
        if not chosen:
            raise ClientError(f"step {deferred.seq} has nothing left to sample")
        ids = self._channel.next_ids()
        request = SampleTokens(
            **ids._asdict(),
            step_seq=step.seq,
            extensions=sampling.extensions,
            slots=None if len(chosen) == len(step.left) else named(chosen),
        )
        frames = encode_step(request, sampling.frames)
        future = self._steps.expect(self, ids.epoch, ids.seq, step.later(chosen))
        self._channel.send_step(ids, frames)
        slots.take_later(step, chosen)
        self._steps.times.sent(ids.seq, began_ns, None)
        return future

    def await_credit(self) -> None:
        """Wait until another step may be sent. Steps that fail meanwhile report it by their
        futures. Raises as wait_for() does."""
        while self._is_full:
            oldest = self._steps.pending[0]
            self.wait_for(oldest, oldest.deadline)

    def execute_dummy_batch(self) -> StepFuture:
        """Run a one-token forward pass without effect on any request; its result is empty. Fails
        and raises as execute_model does."""
        self._channel.check_usable()
        failure = self._unreported_failure()
        if failure is not None:
            return self._refuse(failure)
        self._check_credit()
        ids = self._channel.next_ids()
        future = self._steps.expect(self, ids.epoch, ids.seq, None)
        self._channel.send_step(ids, encode_step(ExecuteDummyBatch(**ids._asdict())))
        return future

    def take_replies(self, future: StepFuture) -> None:
        """Process the replies that are here, until `future` is settled; never waits."""
        while not future.settled and self._channel.take_reply(0.0):
            pass

    def wait_for(self, future: StepFuture, until: float) -> None:
        """Process replies until `future` is settled, its own deadline passes (which fails it), or
        `until` does. Raises as check_given_up_link does."""
        while not future.settled:
            now = time.monotonic()
            if now >= future.deadline:
                self.take_replies(future)  # replies that came while this process was stopped
                if not future.settled:
                    self._steps.fail_hung(future)
            elif now >= until:
                return
            else:
                self._channel.take_reply(min(until, future.deadline))
        self._channel.check_given_up_link()

    # ------------------------------------------------------------------ inside

    def _unreported_failure(self) -> Failure | None:
        """Return the failure that no result() has reported yet, if there is one. It may occur only
        now, when a broken link is replaced before the next step.

        Raises:
            WorkerDied: the group is unusable.
        """
        if self._state.answer(GroupRequest.SEND) is Answer.AWAIT_END:
            self._channel.await_announced_end()
        if self._state.answer(GroupRequest.SEND) is Answer.RELINK:
            try:
                self.relink()
            except WorkerDied:
                raise
            except (ClientError, WireError) as error:
                self._steps.fail_relink(error)
        return self._steps.unreported_failure

    def _refuse(self, failure: Failure) -> StepFuture:
        """Return a future that fails at once; nothing was sent for it."""
        refused = StepFuture(self, 0, None, 0.0)
        failure.settle(refused)
        return refused

    @property
    def _is_full(self) -> bool:
        """True while no further step may be sent."""
        most = self.max_in_flight
        return self._steps.num_pending >= most and self.num_in_flight >= most

    def _check_credit(self) -> None:
        if self._is_full:
            raise TooManyStepsInFlight(
                f"{self.num_in_flight} steps are in flight, the most for a pipeline of "
                f"{self.parallel.pipeline_parallel_size} takes: wait for a result first"
            )

    def _leave(self) -> None:
        self._finish_steps()
        self._attaching.leave()

    def _finish_steps(self) -> None:
        """Wait for the results in flight, then for the ranks that owe none; not for long."""
        until = time.monotonic() + CLOSE_WAIT_S
        with contextlib.suppress(ClientError, WireError):
            for future in self._steps.pending:
                self.wait_for(future, until)
            if self._attaching.is_attached:
                self._channel.await_ranks()

    def _drain(self) -> None:
        """Wait for the steps in flight, so that an operation on all rows finds none running."""
        for future in self._steps.pending:
            self.wait_for(future, future.deadline)


def _read_rows(channel: GroupChannel) -> list[list[RankRow]]:
    """Return the rows of each rank's requests, read page by page."""
    rows: list[list[RankRow]] = [[] for _ in channel.daemons.clients]
    next_slots = [0] * len(channel.daemons.clients)

    while True:
        replies = channel.ask_each(lambda rank: partial(AdoptRequests, first_slot=next_slots[rank]))
        for rank, reply in enumerate(replies):
            rows[rank] += read_page(reply)
            next_slots[rank] = reply.next_slot or NO_MORE_SLOTS
        if not any(reply.next_slot for reply in replies):
            return rows


def parse_endpoints(
    endpoints: Sequence[str], parallel: ParallelConfig, keys: Keys
) -> list[Endpoint]:
    """Return the endpoints of a group's ranks. Raises ClientConfigError as WorkerGroup does."""
    if len(endpoints) != parallel.world_size:
        raise ClientConfigError(
            f"pipeline_parallel_size {parallel.pipeline_parallel_size} x tensor_parallel_size "
            f"{parallel.tensor_parallel_size} needs {parallel.world_size} daemons",
            field="endpoints",
            value=list(endpoints),
            fix=f"give {parallel.world_size} endpoints, or other parallel sizes",
        )
    parsed = [parse_endpoint(endpoint, keys) for endpoint in endpoints]
    if len(set(endpoints)) != len(endpoints):
        raise ClientConfigError(
            "an endpoint is named twice",
            field="endpoints",
            value=list(endpoints),
            fix="name each daemon once",
        )
    return parsed
