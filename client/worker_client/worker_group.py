"""A pipeline x tensor group of daemons as one worker, alone, one replica of several, or all
replicas in lockstep: its typed operations, their order and their timeouts."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema.adoption import AdoptRequests
from rpc_schema.codec import encode_step
from rpc_schema.config import ParallelConfig, WorkerConfig
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.health import CheckHealthReply
from rpc_schema.kv_cache import groups_of
from rpc_schema.step import ExecuteDummyBatch
from rpc_schema.weight_transfer import RunningRows
from worker_client.errors import (
    ClientConfigError,
    ClientError,
    TooManyStepsInFlight,
    WorkerDied,
    config_error,
)
from worker_client.group.adoption import AdoptedRequest, RankRow, merge, read_page
from worker_client.group.attaching import LEASE_WAIT_S, Attachment
from worker_client.group.drafts import GroupDrafts
from worker_client.group.experts import GroupExperts
from worker_client.group.failure_state import Answer, Change, FailureState, GroupRequest
from worker_client.group.group_channel import SOLE_REPLICA, GroupChannel, ReplicaPlace
from worker_client.group.group_events import RankProgress as RankProgress
from worker_client.group.kv_files import GroupKVFiles
from worker_client.group.kv_transfers import GroupTransfers
from worker_client.group.load_chain import LoadChain
from worker_client.group.loading import (
    LoadedGroup,
    Loader,
    check_config,
    check_fields,
    group_limits,
)
from worker_client.group.loras import GroupLoras
from worker_client.group.memory import GroupMemory
from worker_client.group.outcomes import Failure, StepFuture, StepsInFlight
from worker_client.group.prefixes import GroupPrefixes
from worker_client.group.profiling import GroupProfiling
from worker_client.group.replacement import REPLACE_WITHIN_S, Replacement, ReplacementReport
from worker_client.group.uploads import GroupUploads
from worker_client.group.waiting import Waiter
from worker_client.group.weights import GroupWeights
from worker_client.scheduler_output import SchedulerOutput, StepValues
from worker_client.steps.encoded_step import EncodedStep
from worker_client.steps.lockstep import LockstepSlots
from worker_client.steps.lockstep_step import LockstepStep
from worker_client.steps.slots import SlotTable
from worker_client.wire.endpoint import Endpoint, new_driver_id, parse_endpoint
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.lease import LeaseTerms

NO_MORE_SLOTS = 65535
"""A row number that does not exist."""

_EncodeSampling: TypeAlias = Callable[..., EncodedStep | LockstepStep | None]


class WorkerGroup:
    """Owns the sockets to a group's daemons. Belongs to one thread; close() (or `with`) frees it.

    Order: attach(), prepare(config), then execute_model() as often as wanted. All but steps and
    the group's own life is in `weights`, `experts`, `memory` (sleep mode), `loras`, `uploads`,
    `prefixes`, `drafts`, `profiling`, `watch` (liveness) and `lease`.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        parallel: ParallelConfig,
        keys: Keys = NO_KEYS,
        *,
        lease: LeaseTerms | None = None,
        dp_rank: int | None = None,
        driver_id: bytes | None = None,
    ) -> None:
        """Connect; nothing is sent yet. Endpoint i becomes rank i. keys: ours and the daemons', for
        endpoints that have any. lease: its terms; None: the defaults. dp_rank: number of the
        replica that this group is, if there are several (data_parallel_size) that are not in
        lockstep; its first endpoint becomes rank dp_rank * world_size. driver_id: of all replicas
        of a driver; None: a new one.

        Raises:
            ClientConfigError: the number of endpoints is not the group's size, one of them is
                unusable, or a size is, or there is no such replica.
        """
        check_fields("parallel", parallel, ParallelConfig)
        place = _replica_place(parallel, dp_rank)
        parsed = parse_endpoints(endpoints, parallel, keys, parallel.replicas_in_step)
        self.parallel = parallel
        self.driver_id = new_driver_id() if driver_id is None else driver_id
        self.max_in_flight = parallel.pipeline_parallel_size + 1
        replicas = [
            parallel.ranks_of(place.dp_rank + other) for other in range(parallel.replicas_in_step)
        ]
        self.ranks = range(replicas[0].start, replicas[-1].stop)
        """Global ranks of its daemons."""
        tp_size = parallel.tensor_parallel_size
        self.first_stage_ranks = [rank for ranks in replicas for rank in ranks[:tp_size]]
        """Ranks that embed prompts."""
        self._state = FailureState(parallel.group_size)
        self._steps = StepsInFlight(self._state, [ranks[-tp_size] for ranks in replicas])
        self.output_rank = self._steps.output_rank
        """Rank that answers steps, the first one of several replicas."""
        terms = LeaseTerms() if lease is None else lease
        self._channel = GroupChannel(parsed, self.driver_id, self._steps, self._state, terms, place)
        self.attachment = Attachment(self._channel, self._steps, self._state, terms)
        """For attaching to several replicas at once."""
        self.load_chain = LoadChain(self._channel)
        """The operations that prepare() consists of, for callers that want another order."""
        self.clients = self._channel.daemons.clients
        self.watch = self._channel.daemons.watch
        """Liveness of the ranks (`.liveness`: alive, suspect or dead), and its changes (`.events`,
        the newest last; `.on_event` is called at each, and must not call the group)."""
        self.lease = self._channel.lease
        """`.heartbeat()` is for LeaseTerms.heartbeat_timeout_s."""
        self._waiter = Waiter(self._channel, self._steps)
        self.loras = GroupLoras(self._channel)
        self.weights = GroupWeights(
            self._channel, self._steps, self._state, self._waiter, self.loras
        )
        self.experts = GroupExperts(self._channel, self._steps, self._state)
        self.memory = GroupMemory(self._channel, self._steps, self._waiter)
        self.uploads = GroupUploads(self._channel)
        self.prefixes = GroupPrefixes(self._channel, self._steps)
        self.kv_files = GroupKVFiles(self._channel)
        self.transfers = GroupTransfers(self._channel)
        self.drafts = GroupDrafts(self._channel, self._steps)
        self.profiling = GroupProfiling(self._channel)
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
            self._waiter.finish(is_attached=self.attachment.is_attached)
            self.attachment.leave()
        finally:
            self._channel.close()

    @property
    def num_in_flight(self) -> int:
        """Number of steps whose outcome is unknown; the later sampling of one does not count."""
        return sum(f.step is None or not f.step.is_later for f in self._steps.pending)

    @property
    def slots(self) -> SlotTable | LockstepSlots:
        """The table of slots; for tests and inspection."""
        return self._steps.slots

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
                yet, or that drain or shut down.

        From here on a thread renews the lease, until close() or detach() gives it back.

        Raises:
            LeaseHeldError: another driver has the lease, and renews it.
            ForbiddenError: force needs the role admin.
            IncompatibleError: a daemon has another protocol version.
            DeadlineExceeded: a daemon does not answer, or its results do not reach this driver.
            WorkerDied: the group has lost a daemon: replace() it, or make a new group.
            WorkerShutsDown: a daemon is about to end.
            NothingListens: no daemon is at an endpoint.
        """
        statuses = self.attachment.attach(
            timeout_s,
            wait_for_lease_s=wait_for_lease_s,
            force=force,
            keep_requests=keep_requests,
            wait_s=wait_s,
        )
        self.weights.learn(statuses)
        return statuses

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

        The new daemon loads its own shard only, from the files that the others have read last.
        These keep their weights, the memory of the KV cache, and graphs without communication.
        Ranks that are asleep are woken first, for which they need memory, and sleep again
        afterwards, unless the rank was lost while they were put to sleep; ranks that were reset
        load too. Requests are lost: earlier futures, or the next step, fail with a StepFailed that
        names them. Ranks that die meanwhile are waited for at their own endpoints, REPLACE_ATTEMPTS
        times in a row.

        Raises:
            ReplacementFailed: no daemon answered, or attempts failed because of another death or
                lack of memory. It may be tried again.
            WorkerError: the new daemon refuses the model or the device.
            ClientError: nothing was loaded that a new daemon could load.
            ClientConfigError: the group has no such rank.
        """
        if rank not in self.ranks:
            fix = f"use one of {list(self.ranks)}"
            raise config_error("rank", rank, "the group has no such rank", fix)
        if self._loaded is None:
            raise ClientError(
                "the group has loaded nothing that a new daemon could load: once the lost daemon "
                "runs again, make a new WorkerGroup, attach() and prepare()"
            )
        self._state.check(GroupRequest.REPLACE)
        config, model = self._loaded
        known = self.weights.version
        replacement = Replacement(
            self._channel,
            self.attachment,
            self._steps,
            self._state,
            self.weights.config or config,
            model,
            known.number if known is not None and known.identity.stamps else None,
            self.experts.finish_switches,
            memory={} if self.memory.is_half_done else None,
        )
        place = None if endpoint is None else parse_endpoint(endpoint, self._keys)
        replaced = replacement.run(rank, place, within_s)
        self.memory.is_half_done = False
        self.weights.learn_replaced(self.get_status())
        if replaced.loaded_ranks and config.lora.max_loras:
            self.loras.restore(replaced.loaded_ranks)
        return replaced

    def detach(self) -> None:
        """Detach, once the steps in flight are over, or some time has passed; models stay
        loaded."""
        self._waiter.finish(is_attached=self.attachment.is_attached)
        self.attachment.detach()

    def shutdown(self) -> None:
        """Stop all daemons."""
        for client in self.clients:
            client.shutdown()

    def get_status(self) -> list[lc.Status]:
        """Return every daemon's state."""
        return self._channel.daemons.get_status()

    def check_health(self) -> list[CheckHealthReply]:
        """Return every daemon's health."""
        return [client.check_health() for client in self.clients]

    def prepare(
        self,
        config: WorkerConfig,
        *,
        num_gpu_blocks: int | None = None,
        fit_max_model_len: bool = False,
        reload: bool = False,
        weights_version: int | None = None,
        state_checkpoints: bool = True,
        content: bytes | None = None,
        on_progress: Callable[[RankProgress], None] | None = None,
    ) -> LoadedGroup:
        """Make the group ready to serve `config`; returns at once if it is loaded already. Requests
        are dropped, unless they are adopted next: start with a new scheduler. Weights that an
        earlier driver has left incomplete, or different on some ranks, are read again in place,
        from the directory that `config` names.

        weights_version: number of the weights' version if they are loaded now. None: that of the
        saved set, or 0. state_checkpoints: False for a scheduler that does not know borders
        (LoadedGroup.checkpoint_blocks): models whose layers keep states get no checkpoints.
        content: what the files of a repository must be (ModelSource.content); None: anything.

        Raises:
            ConfigMismatchError: something else is loaded, and reload is False; names the fields.
            ContentMismatchError: ranks have read different files; names two of them.
            KVPlanError: not one request of max_model_len fits, or more blocks were asked for than
                fit.
            WorkerError: an operation failed; names the first rank that did.
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
        self._channel.events.on_progress = on_progress
        deadline_s = config.scheduler.step_deadline_ms / 1000
        self._channel.links.allow(deadline_s)
        self._waiter.wait_for_all()
        loader = Loader(
            config,
            num_gpu_blocks,
            fit_max_model_len,
            reload,
            self.load_chain,
            self.ranks.index(self.output_rank),
            self._state.needs_relink,
            self.relink,
            self.reset,
            partial(self.weights.reload, running=_while_reloading(config)),
            self.get_status,
            self.experts.finish_switches,
            self.ranks[0],
            weights_version,
            state_checkpoints,
            content,
        )
        model = loader.load(self.get_status())
        self._channel.links.step_deadline_s = deadline_s
        self._loaded = config, model
        self.weights.config = None
        if not model.was_loaded:
            self.weights.learn(self.get_status())
            self.loras.forget()
        elif config.lora.max_loras:
            self.loras.learn()
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
            WorkerError: a rank cannot report; names the first one.
        """
        rows = _read_rows(self._channel)
        kv_cache = self.clients[0].get_status().kv_cache
        assert kv_cache is not None, "legal in READY only"
        groups, every = groups_of(kv_cache), kv_cache.checkpoint_blocks
        size = self.parallel.world_size
        output = self.ranks.index(self.output_rank)
        return [
            replace(request, dp_rank=(self.ranks[0] + begin) // size)
            for begin in range(0, len(rows), size)
            for request in merge(rows[begin : begin + size], output, groups, every)
        ]

    def relink(self) -> None:
        """Build new communicators on all ranks; weights and KV cache stay, requests do not.

        Tokens may have been in transit between ranks, so no row can be trusted. Running requests
        are lost: the next step fails and names them.

        Raises:
            WorkerDied: a daemon is dead: its neighbors may notice that before its own connection
                ends, so this waits a moment.
        """
        self._channel.check_deaths()
        self._waiter.wait_for_all()
        self._steps.lose_rows("the group was relinked")
        self.load_chain.relink()
        self.experts.mend()
        self._state.apply(Change.LINK_MADE)

    def reset(self, to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]) -> None:
        """Return all ranks to an earlier state of the load chain. Requests are lost as in
        relink()."""
        self._waiter.wait_for_all()
        self._steps.lose_rows("the group was reset")
        self.load_chain.reset(to)
        if to == "CREATED":
            self._state.apply(Change.LINK_MADE)

    def execute_model(self, output: SchedulerOutput) -> StepFuture:
        """Send a step to every rank. After a failure the step is sent in full, over a new link if
        need be. Replicas in lockstep take a LockstepOutput: each of their parts goes to its ranks,
        under one seq. The step is done once all of them have replied, and fails with all later
        ones, on all replicas, if a rank of any fails it.

        If a failure has not been reported by any result(), the returned future fails with it, and
        the requests of `output` are lost too: the scheduler planned the step before it knew of the
        failure. The same holds if relinking fails. Requests of the step that wait to be recomputed
        (`weights.recomputation`) are recomputed first.

        Raises:
            TooManyStepsInFlight: pipeline size + 1 steps are in flight.
            InvalidSchedulerOutput: the output breaks a rule; nothing was sent.
            WorkerDied: the group is unusable.
            WeightsNotWhole: a weight update is open, or has failed; nothing was sent.
            DrainingError: an operator drains this group; nothing was sent.
        """
        if self.weights.recomputation.is_pending:
            self.weights.recomputation.advance_for(output)
        if not self._channel.takes_steps_at_once:
            self._channel.check_usable()
            self._channel.check_serving()
            failure = self._unreported_failure()
            if failure is not None:
                failure.lost |= self._steps.slots.fail([output])
                return failure.refuse(self._waiter)
        self._check_credit()
        began_ns = time.monotonic_ns()
        ids = self._channel.next_ids()
        step = self._steps.slots.encode(output, epoch=ids.epoch, link=ids.link, seq=ids.seq)
        future = self._steps.expect(self._waiter, ids.epoch, ids.seq, step)
        self._channel.send_step(ids, step.by_replica, stands_alone=step.resync)
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
        extensions: tuple[StepValues, ...] = (),
        req_ids: Collection[str] | None = None,
    ) -> StepFuture:
        """Sample requests that a step has deferred: req_ids, some of those that are left, or None
        for all. It counts as part of its step: any number may be in flight.

        extensions: values for some of these, as StepMasks with their masks. Requests that have
        finished since, and their values, are left out.

        Raises: as execute_model does, and
            InvalidSchedulerOutput: the step has not deferred a request, or it was sampled, or
            values are malformed; nothing was sent.
            TooLargeError: the values do not fit into a message; nothing was sent.
        """
        self._channel.check_usable()
        failure = deferred.failure or self._steps.unreported_failure
        if failure is not None:
            return failure.refuse(self._waiter)
        step = deferred.step
        if step is None or not step.deferred:
            raise ClientError(f"step {deferred.seq} did not defer its sampling")
        began_ns = time.monotonic_ns()
        ids = self._channel.next_ids()
        encode: _EncodeSampling = self._steps.slots.encode_sampling
        later = encode(step, extensions, req_ids, **ids._asdict())
        if later is None:
            raise ClientError(f"step {deferred.seq} has nothing left to sample")
        future = self._steps.expect(self._waiter, ids.epoch, ids.seq, later)
        self._channel.send_step(ids, later.by_replica)
        self._steps.times.sent(ids.seq, began_ns, None)
        return future

    def await_credit(self) -> None:
        """Wait until another step may be sent. Steps that fail meanwhile report it by their
        futures. Raises as StepFuture.result() does for a link that is given up."""
        while self._is_full:
            oldest = self._steps.pending[0]
            self._waiter.wait_for(oldest, oldest.deadline)

    def execute_dummy_batch(self) -> StepFuture:
        """Run a one-token forward pass without effect on any request; its result is empty. Fails
        and raises as execute_model does."""
        self._channel.check_usable()
        failure = self._unreported_failure()
        if failure is not None:
            return failure.refuse(self._waiter)
        self._check_credit()
        ids = self._channel.next_ids()
        future = self._steps.expect(self._waiter, ids.epoch, ids.seq, None)
        self._channel.send_step(ids, [encode_step(ExecuteDummyBatch(**ids._asdict()))])
        return future

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
            except WorkerDaemonError as error:
                self._steps.fail_relink(error)
        return self._steps.unreported_failure

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


def _read_rows(channel: GroupChannel) -> list[list[RankRow]]:
    """Return the rows of each rank's requests, read page by page."""
    rows: dict[int, list[RankRow]] = {rank: [] for rank in channel.daemons.ranks}
    next_slots = dict.fromkeys(channel.daemons.ranks, 0)

    while True:
        replies = channel.ask_each(lambda rank: partial(AdoptRequests, first_slot=next_slots[rank]))
        for rank, reply in zip(rows, replies, strict=True):
            rows[rank] += read_page(reply)
            next_slots[rank] = reply.next_slot or NO_MORE_SLOTS
        if not any(reply.next_slot for reply in replies):
            return list(rows.values())


def _while_reloading(config: WorkerConfig) -> RunningRows:
    """Return what happens to the requests of an earlier driver, which may be adopted, when its
    incomplete weights are replaced."""
    return "drop" if config.cache.kv_cache_dtype == "fp8" else "keep"


def _replica_place(parallel: ParallelConfig, dp_rank: int | None) -> ReplicaPlace:
    """Return a replica's place. Raises ClientConfigError as WorkerGroup does."""
    size, lockstep = parallel.data_parallel_size, parallel.data_parallel_lockstep
    if lockstep:
        if size == 1:
            fix = "use a larger data_parallel_size, or no lockstep"
            raise config_error(
                "parallel.data_parallel_lockstep", lockstep, "there is one replica", fix
            )
        if dp_rank is not None:
            fix = "leave it out: a WorkerGroup has all replicas in lockstep"
            raise config_error("dp_rank", dp_rank, "replicas in lockstep are one group", fix)
        return SOLE_REPLICA
    if dp_rank is None:
        if size == 1:
            return SOLE_REPLICA
        problem = "a WorkerGroup is one replica"
        fix = "use DataParallelGroup for all of them, give dp_rank, or set data_parallel_lockstep"
        raise config_error("parallel.data_parallel_size", size, problem, fix)
    if not 0 <= dp_rank < size:
        fix = f"use 0 to {size - 1}, or another data_parallel_size"
        raise config_error("dp_rank", dp_rank, "there is no such replica", fix)
    return ReplicaPlace(dp_rank, size)


def parse_endpoints(
    endpoints: Sequence[str],
    parallel: ParallelConfig,
    keys: Keys,
    num_replicas: int,
    field: str = "endpoints",
) -> list[Endpoint]:
    """Return the endpoints of the ranks of so many replicas. field: what has named them. Raises
    ClientConfigError as WorkerGroup does."""
    given: object = endpoints
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    if not is_list or not all(isinstance(each, str) for each in endpoints):
        raise config_error(field, given, "these are no endpoints", "give a list of texts")
    needed = num_replicas * parallel.world_size
    if len(endpoints) != needed:
        replicas = f"data_parallel_size {num_replicas} x " if num_replicas > 1 else ""
        raise ClientConfigError(
            f"{replicas}pipeline_parallel_size {parallel.pipeline_parallel_size} x "
            f"tensor_parallel_size {parallel.tensor_parallel_size} needs {needed} daemons",
            field=field,
            value=list(endpoints),
            fix=f"give {needed} endpoints, or other parallel sizes",
        )
    if len(set(endpoints)) != len(endpoints):
        raise ClientConfigError(
            "an endpoint is named twice",
            field=field,
            value=list(endpoints),
            fix="name each daemon once",
        )
    return [parse_endpoint(endpoint, keys) for endpoint in endpoints]
