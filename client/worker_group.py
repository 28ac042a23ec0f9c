"""A pipeline x tensor group of daemons as one worker: attach, fan-out of operations, steps in
flight, and what happens when one fails. Knows how the wire is spoken, but not what to schedule or
how a model gets loaded (`client/loading.py`).
"""

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from client.errors import (
    ClientConfigError,
    ClientError,
    DeadlineExceeded,
    FencedError,
    NotAttachedError,
    RemoteError,
    TooManyStepsInFlight,
    WorkerDied,
    remote_error,
)
from client.loading import LoadedModel, LoadOptions, check_config, load
from client.outcomes import Failure, Gather, StepFuture
from client.scheduler_output import SchedulerOutput, StepResult
from client.slots import EncodedStep, SlotTable
from client.transport import EventsChannel, ResultsChannel, new_driver_id, parse_endpoint
from client.worker_client import StepIds, WorkerClient
from rpc_schema import lifecycle as lc
from rpc_schema.codec import StepReplyMessage, decode_step_reply
from rpc_schema.config import ParallelConfig, Rendezvous, WorkerConfig
from rpc_schema.errors import (
    BadFrameError,
    ErrorCode,
    ErrorReply,
    ErrorScope,
    TooLargeError,
    WireError,
)
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.step import Done, ModelRunnerOutput

ROOT_CAUSE_WAIT_S = 1.0
"""How long an UPSTREAM_FAILED waits for the rank that really failed."""

STEP_SLACK_S = 2.0
"""A step's own deadline plus this is how long its answer is waited for: the daemons' own timeouts
come first."""

DEATH_NEWS_S = 0.1
"""A killed process's connections end within this time (2 ms measured), not all at once."""

PROGRESS_INTERVAL_S = 0.25
EVENTS_INTERVAL_S = 1.0
"""So often heartbeats that nobody asked for are cleared away while steps run."""

OPERATION_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 3600.0
ATTACH_TIMEOUT_S = 30.0
FINISH_SAVE_TIMEOUT_S = 600.0
"""Removing the files of a large set takes a while."""

SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
SHARD_MAX_SIZE_BYTES = 5 << 30

DEFAULT_STEP_DEADLINE_S = 60.0
"""Assumed of a daemon that has no configuration yet."""

ATTACH_SLACK_S = 15.0
"""Daemons let go of a hung step within its deadline and a few seconds; then they attach."""

LINK_SLACK_S = 30.0


def link_timeout_s(step_deadline_s: float) -> float:
    """Return how long ranks may take to leave one link and meet on the next.

    They wait for each other for up to twice the communicators' own timeout (the step deadline and a
    second) and 5 s; their verdict is to come before ours.
    """
    return 2 * (step_deadline_s + 1.0) + 5.0 + LINK_SLACK_S


ReplyT = TypeVar("ReplyT", bound=StepReplyMessage)
Send = Callable[[WorkerClient, StepIds], None]


class Progress(NamedTuple):
    """What a rank is doing while an operation runs."""

    operation: str
    rank: int
    phase: str
    phase_ms: int


class WorkerGroup:
    """Owns the sockets to a group's daemons. Belongs to one thread; close() (or `with`) frees it.

    Order: attach(), prepare(config), then execute_model() as often as wanted.
    """

    def __init__(self, endpoints: Sequence[str], parallel: ParallelConfig) -> None:
        """Connect; nothing is sent yet. Endpoint i becomes rank i.

        Raises:
            ClientConfigError: the number of endpoints is not the group's size, or one of them is
            unusable.
        """
        if len(endpoints) != parallel.world_size:
            raise ClientConfigError(
                f"pipeline_parallel_size {parallel.pipeline_parallel_size} x tensor_parallel_size "
                f"{parallel.tensor_parallel_size} needs {parallel.world_size} daemons",
                field="endpoints",
                value=list(endpoints),
                fix=f"give {parallel.world_size} endpoints, or other parallel sizes",
            )
        parsed = [parse_endpoint(endpoint) for endpoint in endpoints]
        if len(set(endpoints)) != len(endpoints):
            raise ClientConfigError(
                "an endpoint is named twice",
                field="endpoints",
                value=list(endpoints),
                fix="name each daemon once",
            )
        self.parallel = parallel
        self.driver_id = new_driver_id()
        self.max_in_flight = parallel.pipeline_parallel_size + 1
        self.output_rank = (parallel.pipeline_parallel_size - 1) * parallel.tensor_parallel_size
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._results = ResultsChannel(self._context, parsed, self.driver_id)
        self._events = EventsChannel(self._context, parsed)
        self.clients = [
            WorkerClient(self._context, endpoint, rank, self.driver_id, self._results.check_deaths)
            for rank, endpoint in enumerate(parsed)
        ]
        self._epoch = 0
        self._seq = 0
        self._links = [0] * len(endpoints)
        self._needs_relink = False
        self._attached: list[lc.CommitAttachReply] = []
        self._gather: Gather | None = None
        self._in_flight: dict[int, StepFuture] = {}
        self._recently_done: deque[int] = deque(maxlen=16)
        self._failure: Failure | None = None
        self._suspect: tuple[int, ErrorReply, float] | None = None
        self._dead: ClientError | None = None
        self._slots = SlotTable(1)
        self._step_timeout_s = DEFAULT_STEP_DEADLINE_S + STEP_SLACK_S
        self._link_deadline_s = DEFAULT_STEP_DEADLINE_S
        """The longest step deadline that a rank's present link may have been built with."""
        self._next_events = 0.0
        self._on_progress: Callable[[Progress], None] | None = None

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sockets; the daemons keep what they have."""
        for client in self.clients:
            client.close()
        self._results.close()
        self._events.close()
        self._context.term()

    @property
    def world_size(self) -> int:
        """Number of daemons."""
        return len(self.clients)

    @property
    def num_in_flight(self) -> int:
        """Steps whose outcome is not known."""
        return len(self._in_flight)

    @property
    def slots(self) -> SlotTable:
        """The table of slots; for tests and inspection."""
        return self._slots

    # ------------------------------------------------------------------ attach

    def attach(self, timeout_s: float | None = None) -> list[lc.Status]:
        """Take all daemons over, in two phases, and return their states.

        Requests of earlier drivers are dropped, and so are this group's own where it was attached
        before: its steps in flight fail. timeout_s bounds all of it; the default is
        ATTACH_TIMEOUT_S for agreeing, and then what daemons that hang in a step need to let go.

        Raises:
            IncompatibleError: a daemon speaks another protocol version.
            DeadlineExceeded: a daemon does not answer, or its results do not reach this driver.
            WorkerDied: the group has lost a daemon before: make a new one.
        """
        if isinstance(self._dead, WorkerDied):
            raise self._dead
        agree_s = ATTACH_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + agree_s
        for client in self.clients:
            client.hello(_remaining(deadline))
        statuses = [client.get_status(_remaining(deadline)) for client in self.clients]
        self._link_deadline_s = max(map(_step_deadline_s, statuses))
        epoch = self._agree_on_epoch(deadline)
        self._start_epoch(epoch)
        if timeout_s is None:
            agree_s = self._link_deadline_s + ATTACH_SLACK_S
            deadline = time.monotonic() + agree_s
        self._commit_attach(deadline, agree_s)
        return [reply.status for reply in self._attached]

    def _start_epoch(self, epoch: int) -> None:
        """Forget everything of the epoch before; what was in flight in it fails."""
        error = ClientError("the group was attached anew: requests of before are dropped")
        failure = Failure(error, self.output_rank, ErrorCode.FENCED, "")
        failure.lost |= self._slots.drop_all()
        self._fail_from(0, failure)
        self._failure = self._dead = self._gather = None
        self._recently_done.clear()
        self._epoch, self._seq = epoch, 0

    def _commit_attach(self, deadline: float, timeout_s: float) -> None:
        """To all ranks before any is waited for: gloo has no abort, so a rank that hangs in a step
        is let go by its peers'."""
        gather = self._gather = Gather(0)
        pending = [
            client.send_commit_attach(self._epoch, _remaining(deadline)) for client in self.clients
        ]
        self._attached = [call.result() for call in pending]
        self._collect(gather, "attach", deadline, timeout_s)
        self._links = [reply.status.link for reply in self._attached]
        self._needs_relink = self._must_relink_after_attach()

    def _agree_on_epoch(self, deadline: float) -> int:
        epoch = 1
        while True:
            replies = [
                client.prepare_attach(epoch, _remaining(deadline)) for client in self.clients
            ]
            if all(reply.granted for reply in replies):
                return epoch
            epoch = max(epoch, *(reply.last_epoch for reply in replies)) + 1

    def _must_relink_after_attach(self) -> bool:
        """A link is kept only if every rank is idle at the same step of the same link."""
        stand = {(r.previous_epoch, r.previous_seq, r.status.link) for r in self._attached}
        clean = all(r.previous_clean and r.status.link_state == "up" for r in self._attached)
        linked = any(r.status.link for r in self._attached)
        return self.world_size > 1 and linked and not (clean and len(stand) == 1)

    def detach(self) -> None:
        """Leave in order; models stay loaded."""
        for client in self.clients:
            client.detach(self._epoch)

    def shutdown(self) -> None:
        """End all daemons."""
        for client in self.clients:
            client.shutdown()

    def get_status(self) -> list[lc.Status]:
        """Ask every daemon for its state."""
        return [client.get_status() for client in self.clients]

    def check_health(self) -> list[lc.CheckHealthReply]:
        """Ask every daemon whether it makes progress."""
        return [client.check_health() for client in self.clients]

    # ------------------------------------------------------------------ load

    def prepare(
        self,
        config: WorkerConfig,
        *,
        num_gpu_blocks: int | None = None,
        fit_max_model_len: bool = False,
        reload: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> LoadedModel:
        """Make the group ready to serve `config`; goes on at once where it is loaded already.
        Requests that it has are dropped: start with a new scheduler.

        Raises:
            ConfigMismatchError: something else is loaded, and reload is False; names the fields.
            KVPlanError: not one request of max_model_len fits, or more blocks were asked for than
            fit. RemoteError: an operation failed; names the first rank that did.
        """
        self._check_usable()
        check_config(config)
        if config.parallel != self.parallel:
            raise ClientConfigError(
                "the configuration is for another group",
                field="config.parallel",
                value=config.parallel,
                fix=f"use the group's own: {self.parallel}",
            )
        self._on_progress = on_progress
        deadline_s = config.scheduler.step_deadline_ms / 1000
        self._link_deadline_s = max(self._link_deadline_s, deadline_s)
        self._drain()
        options = LoadOptions(num_gpu_blocks, fit_max_model_len=fit_max_model_len, reload=reload)
        model = load(self, config, self.get_status(), options)
        self._link_deadline_s, self._step_timeout_s = deadline_s, deadline_s + STEP_SLACK_S
        self._slots = SlotTable(config.scheduler.max_num_seqs)
        self._slots.require_resync()
        self._failure = None
        return model

    @property
    def needs_relink(self) -> bool:
        """Whether the communicators must be built anew before the next step."""
        return self._needs_relink

    def init_device(self, config: WorkerConfig) -> list[lc.InitDeviceReply]:
        """Create device contexts and the first link."""
        deadline_s = config.scheduler.step_deadline_ms / 1000
        self._link_deadline_s = max(self._link_deadline_s, deadline_s)
        rendezvous = self._open_rendezvous()
        replies = self._fan_out(
            "init_device",
            lambda client, ids: client.init_device(
                ids, config.parallel, rendezvous[client.rank], config.cache, config.scheduler
            ),
            lc.InitDeviceReply,
            timeout_s=link_timeout_s(self._link_deadline_s) + OPERATION_TIMEOUT_S,
        )
        self._linked(rendezvous)
        return replies

    def relink(self) -> None:
        """Build new communicators on all ranks; weights and KV cache stay, requests do not.

        Tokens may have been under way between ranks, so no row can be trusted. The requests that
        are running are lost: the next step fails and names them.

        Raises:
            WorkerDied: a daemon is gone: its neighbours may know that before its own connection
                ends, hence a moment's patience.
        """
        try:
            self._results.check_deaths(DEATH_NEWS_S)
        except WorkerDied as error:
            self._die(error)
            raise
        self._drain()
        self._lose_rows("the group was linked anew")
        rendezvous = self._open_rendezvous()
        self._fan_out(
            "relink",
            lambda client, ids: client.relink(ids, rendezvous[client.rank]),
            Done,
            timeout_s=link_timeout_s(self._link_deadline_s),
        )
        self._linked(rendezvous)
        self._needs_relink = False

    def reset(self, to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]) -> None:
        """Go back down the load chain on all ranks. Requests are lost as in relink()."""
        self._drain()
        self._lose_rows("the group was reset")
        self._fan_out(
            "reset",
            lambda client, ids: client.reset(ids, to),
            Done,
            timeout_s=link_timeout_s(self._link_deadline_s),
        )
        if to == "CREATED":
            self._needs_relink = False
        self._refresh_links()

    def load_model(self, config: WorkerConfig) -> list[lc.LoadModelReply]:
        """Load every rank's part of the model."""
        return self._fan_out(
            "load_model",
            lambda client, ids: client.load_model(
                ids, config.model, config.scheduler, config.cache, config.graph
            ),
            lc.LoadModelReply,
            timeout_s=LOAD_TIMEOUT_S,
        )

    def get_kv_cache_spec(self) -> list[lc.GetKVCacheSpecReply]:
        """What each rank's layers keep per token."""
        return self._fan_out(
            "get_kv_cache_spec", WorkerClient.get_kv_cache_spec, lc.GetKVCacheSpecReply
        )

    def determine_available_memory(self) -> list[lc.DetermineAvailableMemoryReply]:
        """Profile every rank."""
        return self._fan_out(
            "determine_available_memory",
            WorkerClient.determine_available_memory,
            lc.DetermineAvailableMemoryReply,
            timeout_s=LOAD_TIMEOUT_S,
        )

    def initialize_from_config(self, configs: tuple[KVCacheConfig, ...]) -> None:
        """Allocate every rank's KV cache."""
        self._fan_out(
            "initialize_from_config",
            lambda client, ids: client.initialize_from_config(ids, configs),
            Done,
        )

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        """Tell every rank the block count."""
        self._fan_out(
            "initialize_cache",
            lambda client, ids: client.initialize_cache(ids, num_gpu_blocks),
            Done,
        )

    def update_max_model_len(self, max_model_len: int) -> None:
        """Tell every rank the longest context."""
        self._fan_out(
            "update_max_model_len",
            lambda client, ids: client.update_max_model_len(ids, max_model_len),
            Done,
        )

    def compile_or_warm_up_model(self) -> list[lc.CompileOrWarmUpModelReply]:
        """Warm every rank up."""
        return self._fan_out(
            "compile_or_warm_up_model",
            WorkerClient.compile_or_warm_up_model,
            lc.CompileOrWarmUpModelReply,
            timeout_s=LOAD_TIMEOUT_S,
        )

    def get_supported_tasks(self) -> list[lc.GetSupportedTasksReply]:
        """What each rank's model can do."""
        return self._fan_out(
            "get_supported_tasks", WorkerClient.get_supported_tasks, lc.GetSupportedTasksReply
        )

    def get_model_metadata(self) -> list[lc.GetModelMetadataReply]:
        """What a driver needs to know of the model, from each rank."""
        return self._fan_out(
            "get_model_metadata", WorkerClient.get_model_metadata, lc.GetModelMetadataReply
        )

    # ------------------------------------------------------------------ weights

    def compute_weight_checksums(self) -> list[lc.ComputeWeightChecksumsReply]:
        """Hash every rank's weights, tensor by tensor, as they are now."""
        return self._fan_out(
            "compute_weight_checksums",
            WorkerClient.compute_weight_checksums,
            lc.ComputeWeightChecksumsReply,
            timeout_s=LOAD_TIMEOUT_S,
        )

    def save_sharded_state(
        self,
        name: str,
        pattern: str = SHARD_PATTERN,
        max_size_bytes: int = SHARD_MAX_SIZE_BYTES,
    ) -> list[lc.SaveShardedStateReply]:
        """Save the group's weights as the set `name` under the daemons' save root, which they must
        share; load it with load_format="sharded_state".

        All ranks write at once, beside a set that has the name already; rank 0 then puts the new
        one in its place in one step. After an error of a rank the old set is in place and nothing
        else; what a dead rank has left goes with the next save. No group may load the set
        meanwhile. pattern names the files, by {rank} and {part}; max_size_bytes bounds each.

        Raises:
            RemoteConfigError: no daemon option --save-root, or not the same one, or the name or the
            pattern is not allowed. RemoteCapacityError: the disk is full.
        """
        save = secrets.token_bytes(16)
        try:
            replies = self._fan_out(
                "save_sharded_state",
                lambda client, ids: client.save_sharded_state(
                    ids, save, name, pattern, max_size_bytes
                ),
                lc.SaveShardedStateReply,
                timeout_s=LOAD_TIMEOUT_S,
            )
        except (RemoteError, DeadlineExceeded):
            self._discard_sharded_state(save)
            raise
        self._keep_sharded_state(save)
        return replies

    def _keep_sharded_state(self, save: bytes) -> None:
        try:
            self._finish_sharded_state(save, keep=True)
        except RemoteError as error:
            if error.rank == 0:  # else rank 0 may be about to put those files in place
                self._discard_sharded_state(save)
            raise

    def _discard_sharded_state(self, save: bytes) -> None:
        with contextlib.suppress(ClientError, WireError):  # the next save cleans up as well
            self._finish_sharded_state(save, keep=False)

    def _finish_sharded_state(self, save: bytes, *, keep: bool) -> None:
        self._fan_out(
            "finish_sharded_state",
            lambda client, ids: client.finish_sharded_state(ids, save, keep=keep),
            Done,
            timeout_s=FINISH_SAVE_TIMEOUT_S,
        )

    # ------------------------------------------------------------------ profiles

    def profile(
        self,
        action: Literal["start", "stop"],
        prefix: str = "",
        kind: Literal["torch", "cuda"] = "torch",
    ) -> list[lc.ProfileReply]:
        """Begin or end a profile of every rank; ending one of kind torch writes a trace a rank.
        After an error some ranks may record: stop ends that, and is no error for the others.

        prefix names the traces; without one they are called as those before, and replace them.

        Raises:
            IllegalStateError: a profile runs already, or one of the other kind.
            RemoteConfigError: the prefix is no plain name, or traces cannot be written.
            RemoteCapacityError: the disk is full.
        """
        return self._fan_out(
            "profile",
            lambda client, ids: client.profile(ids, action, prefix, kind),
            lc.ProfileReply,
            timeout_s=LOAD_TIMEOUT_S,
        )

    # ------------------------------------------------------------------ steps

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        """Send a step to every rank. After a failure the step goes in full, over a new link where
        need be.

        If a failure is known that no result() has told yet, the returned future fails with it, and
        the requests of `output` count as lost too: a scheduler that has not heard of the failure
        cannot have meant this step. The same goes for a new link that cannot be had.

        Raises:
            TooManyStepsInFlight: pipeline size + 1 steps are in flight.
            InvalidSchedulerOutput: the output breaks a rule; nothing was sent.
            WorkerDied: the group is unusable.
        """
        self._check_usable()
        failure = self._untold_failure()
        if failure is not None:
            failure.lost |= self._slots.fail([output])
            return self._refuse(failure)
        self._check_credit()
        seq = self._seq + 1
        step = self._slots.encode(output, epoch=self._epoch, link=self._links[0], seq=seq)
        self._seq = seq
        future = self._expect(seq, step, samples=not output.defer_sampling)
        self._send_to_all(lambda client: client.execute_model(step.frames))
        return future

    def sample_tokens(
        self, deferred: StepFuture, masks: Mapping[str, NDArray[np.int32]] | None = None
    ) -> StepFuture:
        """Complete the sampling of a step with defer_sampling.

        masks: for some of its requests, int32 [ceil(vocab_size / 32)], bit 1 = allowed. Requests
        that have finished since are left out, and so are their masks.

        Raises: as execute_model does, and
            InvalidSchedulerOutput: a mask is for a request that the step does not sample, or masks
            differ in length; nothing was sent.
            TooLargeError: the masks do not fit into a message; nothing was sent.
        """
        self._check_usable()
        step = deferred.step
        if step is None or deferred.samples:
            raise ClientError(f"step {deferred.seq} did not defer its sampling")
        if deferred.failure is not None:
            return self._refuse(deferred.failure)
        self._check_credit()
        slots, frames = self._slots.encode_masks(step, masks or {})
        ids = self._next_ids()
        future = self._expect(ids.seq, step, samples=True)
        self._send_to_all(lambda client: client.sample_tokens(ids, step.seq, slots, frames))
        return future

    def execute_dummy_batch(self) -> StepFuture:
        """Run a one-token forward without effect on any request; its result is empty. Fails and
        raises as execute_model does."""
        self._check_usable()
        failure = self._untold_failure()
        if failure is not None:
            return self._refuse(failure)
        self._check_credit()
        ids = self._next_ids()
        future = self._expect(ids.seq, None, samples=False)
        self._send_to_all(lambda client: client.execute_dummy_batch(ids))
        return future

    def take_replies(self, future: StepFuture) -> None:
        """Take in the replies that are here, until `future` is settled; never waits."""
        while not future.settled and self._take_reply(0.0):
            pass

    def wait_for(self, future: StepFuture, until: float) -> None:
        """Take in replies until `future` is settled, its own deadline passes (which fails it), or
        `until` does."""
        while not future.settled:
            now = time.monotonic()
            if now >= future.deadline:
                self._fail_hung(future)
            elif now >= until:
                return
            else:
                self._take_reply(min(until, future.deadline))

    # ------------------------------------------------------------------ inside

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise self._dead
        if not self._epoch:
            raise ClientError("the group is not attached: call attach() and prepare() first")

    def _untold_failure(self) -> Failure | None:
        """The failure that no result() has told yet, if any: also one that shows only now, as a
        broken link is mended before the next step.

        Raises:
            WorkerDied: the group is unusable.
        """
        if self._needs_relink and not self._has_untold_failure:
            self._mend_link()
        return self._failure if self._has_untold_failure else None

    @property
    def _has_untold_failure(self) -> bool:
        return self._failure is not None and not self._failure.reported

    def _refuse(self, failure: Failure) -> StepFuture:
        """A future that fails at once; nothing was sent for it."""
        refused = StepFuture(self, 0, None, 0.0)
        failure.settle(refused)
        return refused

    def _mend_link(self) -> None:
        """Relink. Where that fails, so does the step that it was for: its scheduler has committed
        to it already."""
        try:
            self.relink()
        except (ClientError, WireError) as error:
            if isinstance(error, WorkerDied):
                raise
            remote = error if isinstance(error, RemoteError) else None
            if isinstance(error, FencedError | NotAttachedError):
                self._dead = error
            rank = self.output_rank if remote is None else remote.rank
            code = ErrorCode.COMM if remote is None else remote.code
            traceback = "" if remote is None else remote.remote_traceback
            self._fail_from(0, Failure(_as_client(error), rank, code, traceback))

    def _lose_rows(self, reason: str) -> None:
        """Forget all requests, and have the next step fail so that the scheduler hears of it."""
        lost = self._slots.drop_all()
        if lost:
            failure = Failure(ClientError(reason), self.output_rank, ErrorCode.PRECEDED_BY, "")
            failure.lost |= lost
            self._fail_from(0, failure)

    def _check_credit(self) -> None:
        if len(self._in_flight) >= self.max_in_flight:
            raise TooManyStepsInFlight(
                f"{len(self._in_flight)} steps are in flight, which is all that a pipeline of "
                f"{self.parallel.pipeline_parallel_size} takes: wait for a result first"
            )

    def _next_ids(self) -> StepIds:
        self._seq += 1
        return StepIds(self._epoch, self._links[0], self._seq)

    def _expect(self, seq: int, step: EncodedStep | None, *, samples: bool) -> StepFuture:
        future = StepFuture(self, seq, step, time.monotonic() + self._step_timeout_s)
        future.samples = samples
        self._in_flight[seq] = future
        return future

    def _send_to_all(self, send: Callable[[WorkerClient], None]) -> None:
        try:
            for client in self.clients:
                send(client)
        except WorkerDied as error:
            self._die(error)
            raise
        except TooLargeError:  # for the first rank, as it would be for all: nothing was sent
            self._in_flight.pop(self._seq, None)
            self._gather = None
            self._seq -= 1
            raise

    def _fan_out(
        self,
        operation: str,
        send: Send,
        reply_type: type[ReplyT],
        *,
        timeout_s: float = OPERATION_TIMEOUT_S,
    ) -> list[ReplyT]:
        """Send one operation to every rank under one seq and return the replies in rank order."""
        self._check_usable()
        self._events.discard_all()
        self._seq += 1
        gather = self._gather = Gather(self._seq)
        self._send_to_all(
            lambda client: send(client, StepIds(self._epoch, self._links[client.rank], gather.seq))
        )
        try:
            self._collect(gather, operation, time.monotonic() + timeout_s, timeout_s)
        except (RemoteError, DeadlineExceeded):
            self._refresh_links()
            raise
        replies = sorted(gather.replies, key=lambda reply: reply.rank)
        typed: list[ReplyT] = [reply for reply in replies if isinstance(reply, reply_type)]
        if len(typed) != len(replies):
            raise BadFrameError(f"{operation} was answered with a reply of another operation")
        return typed

    def _collect(self, gather: Gather, operation: str, deadline: float, timeout_s: float) -> None:
        while len(gather.replies) < self.world_size:
            if gather.errors:
                raise self._root_cause(gather, operation)
            now = time.monotonic()
            if now >= deadline:
                missing = self.world_size - len(gather.replies)
                raise DeadlineExceeded(f"{operation} ({missing} ranks are missing)", timeout_s)
            self._take_reply(min(deadline, now + PROGRESS_INTERVAL_S))
            self._report_progress(operation)
        self._gather = None

    def _root_cause(self, gather: Gather, operation: str) -> RemoteError:
        """The first failure, unless it only tells of a peer's: then that peer's, if it comes
        soon."""
        consequences = (ErrorCode.UPSTREAM_FAILED, ErrorCode.COMM)
        until = time.monotonic() + ROOT_CAUSE_WAIT_S
        while all(e.code in consequences for e in gather.errors) and time.monotonic() < until:
            if len(gather.errors) + len(gather.replies) >= self.world_size:
                break
            self._take_reply(until)
        self._gather = None
        cause = next((e for e in gather.errors if e.code not in consequences), gather.errors[0])
        error = self._to_error(cause)
        error.add_note(f"in {operation}")
        return error

    def _report_progress(self, operation: str) -> None:
        for event in self._events.receive_all():
            if self._on_progress is not None and isinstance(event, lc.Heartbeat):
                self._on_progress(Progress(operation, event.rank, event.phase, event.phase_ms))

    def _discard_events(self) -> None:
        """Keep the events' queue from filling up while steps run; operations read theirs."""
        now = time.monotonic()
        if self._gather is None and now >= self._next_events:
            self._next_events = now + EVENTS_INTERVAL_S
            self._events.discard_all()

    def _take_reply(self, deadline: float) -> bool:
        """Take in one reply; False when none came by the deadline."""
        if self._suspect is not None:
            deadline = min(deadline, self._suspect[2])
        self._discard_events()
        try:
            frames = self._results.receive(deadline)
            reply = None if frames is None else decode_step_reply(frames)
        except (WorkerDied, WireError) as error:
            self._die(error)
            raise
        if frames is None or reply is None:
            self._convict_suspect()
            return False
        if reply.epoch == self._epoch:
            self._dispatch(reply, frames)
        return True

    def _dispatch(self, reply: StepReplyMessage, frames: Sequence[bytes]) -> None:
        gather = self._gather
        if isinstance(reply, ErrorReply) and reply.seq == 0 and reply.epoch == self._epoch:
            # A daemon could not read a request of ours: it fails what is outstanding.
            outstanding = gather.seq if gather is not None else min(self._in_flight, default=0)
            reply = msgspec.structs.replace(reply, seq=outstanding)
        if gather is not None and reply.seq == gather.seq:
            if isinstance(reply, ErrorReply):
                gather.errors.append(reply)
            else:
                gather.replies.append(reply)
        elif isinstance(reply, ErrorReply):
            self._on_step_error(reply)
        elif reply.rank == self.output_rank and reply.seq in self._in_flight:
            self._on_step_done(reply, frames)

    def _on_step_done(self, reply: StepReplyMessage, frames: Sequence[bytes]) -> None:
        future = self._in_flight[reply.seq]
        try:
            future.value = _decode_outcome(future, reply, frames[1:])
        except BadFrameError as error:
            self._fail_from(reply.seq, Failure(_as_client(error), reply.rank, error.code, ""))
            return
        del self._in_flight[reply.seq]
        self._recently_done.append(reply.seq)

    def _on_step_error(self, reply: ErrorReply) -> None:
        if reply.seq in self._recently_done:
            self._fail_all_rows(reply)
        elif reply.seq not in self._in_flight:
            return
        elif reply.code is ErrorCode.UPSTREAM_FAILED and self._suspect is None:
            self._suspect = (reply.seq, reply, time.monotonic() + ROOT_CAUSE_WAIT_S)
        elif reply.code is not ErrorCode.UPSTREAM_FAILED:
            self._fail_by_reply(reply)

    def _convict_suspect(self) -> None:
        """Nobody else has owned up in time: the step fails with the UPSTREAM_FAILED that told of
        it."""
        if self._suspect is not None and time.monotonic() >= self._suspect[2]:
            self._fail_by_reply(self._suspect[1])

    def _fail_by_reply(self, reply: ErrorReply) -> None:
        error = self._to_error(reply)
        broken = reply.scope is ErrorScope.GROUP or reply.code in (ErrorCode.COMM, ErrorCode.GAP)
        self._needs_relink = self._needs_relink or (broken and self.world_size > 1)
        if isinstance(error, FencedError | NotAttachedError):
            self._dead = error
        seq = reply.seq if self._suspect is None else min(reply.seq, self._suspect[0])
        if reply.code is ErrorCode.GAP:
            seq = min(seq, reply.expected_seq)  # what is missing never ran either
        self._fail_from(seq, Failure(error, reply.rank, reply.code, reply.traceback))

    def _fail_all_rows(self, reply: ErrorReply) -> None:
        """A rank failed a step whose result is out already: its rows are behind everybody
        else's."""
        self._needs_relink = self._needs_relink or self.world_size > 1
        failure = Failure(self._to_error(reply), reply.rank, reply.code, reply.traceback)
        failure.lost |= self._slots.drop_all()
        self._fail_from(0, failure)

    def _fail_hung(self, future: StepFuture) -> None:
        error = DeadlineExceeded(f"step {future.seq}", self._step_timeout_s)
        failure = Failure(error, self.output_rank, ErrorCode.COMM, "")
        failure.lost |= self._slots.drop_all()
        self._needs_relink = self._needs_relink or self.world_size > 1
        self._fail_from(future.seq, failure)

    def _fail_from(self, seq: int, failure: Failure) -> None:
        """Fail step `seq` and every step behind it; and all requests where the link is broken,
        since no row survives a relink."""
        failed = [future for number, future in self._in_flight.items() if number >= seq]
        steps = [future.step for future in failed if future.step is not None]
        failure.lost |= self._slots.fail(step.output for step in steps)
        if self._needs_relink or any(step.resync for step in steps):
            failure.lost |= self._slots.drop_all()
        for future in failed:
            failure.settle(future)
            del self._in_flight[future.seq]
        if self._failure is not None and not self._failure.reported:
            failure.take_over(self._failure)
        self._failure = failure
        self._suspect = None

    def _die(self, error: ClientError | WireError) -> None:
        self._dead = _as_client(error)
        rank = error.rank if isinstance(error, WorkerDied) else self.output_rank
        self._fail_from(0, Failure(self._dead, rank, ErrorCode.COMM, ""))

    def _drain(self) -> None:
        """Wait for the steps in flight, so that an operation on all rows finds none running."""
        for future in list(self._in_flight.values()):
            self.wait_for(future, future.deadline)

    def _open_rendezvous(self) -> list[Rendezvous]:
        link = max(self._links) + 1
        opened = self.clients[0].open_rendezvous(self._epoch, link)
        return [
            Rendezvous(
                link=link,
                host=opened.host,
                port=opened.port,
                rank=rank,
                local_world_size=self.world_size,
            )
            for rank in range(self.world_size)
        ]

    def _linked(self, rendezvous: Sequence[Rendezvous]) -> None:
        self._links = [entry.link for entry in rendezvous]

    def _refresh_links(self) -> None:
        """Ask each rank which link it stands in: after a failure they need not agree."""
        self._links = [client.get_status().link for client in self.clients]

    def _to_error(self, reply: ErrorReply) -> RemoteError:
        rank = min(reply.rank, self.world_size - 1)
        return remote_error(reply, rank=reply.rank, endpoint=self.clients[rank].endpoint.control)


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _step_deadline_s(status: lc.Status) -> float:
    if status.config is None:
        return DEFAULT_STEP_DEADLINE_S
    return status.config.scheduler.step_deadline_ms / 1000


def _as_client(error: ClientError | WireError) -> ClientError:
    return error if isinstance(error, ClientError) else ClientError(f"{error.code}: {error}")


def _decode_outcome(
    future: StepFuture, reply: StepReplyMessage, arrays: Sequence[bytes]
) -> StepResult:
    if not isinstance(reply, ModelRunnerOutput):
        raise BadFrameError(f"step {future.seq} was answered with {type(reply).__name__}")
    if future.step is None or not future.samples:
        return StepResult((), ())
    return SlotTable.decode(future.step, reply, arrays)
