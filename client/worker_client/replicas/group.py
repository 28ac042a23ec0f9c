"""The replicas of a data-parallel group: one driver's hold on all of their daemons, and operations
on all of them. Steps are each replica's own."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema.config import ParallelConfig, WorkerConfig
from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import WorkerDied, config_error
from worker_client.group.attaching import LEASE_WAIT_S, attach_together
from worker_client.group.loading import (
    LoadedGroup,
    check_config,
    check_fields,
    check_same_config,
)
from worker_client.group.replacement import REPLACE_WITHIN_S, ReplacementReport
from worker_client.group.together import results_of, run_together
from worker_client.group.weights_state import check_same_weights, differing_ranks
from worker_client.replicas.loras import ReplicaLoras
from worker_client.wire.endpoint import new_driver_id
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import RankProgress, WorkerGroup, parse_endpoints

ResultT = TypeVar("ResultT")


class DataParallelGroup:
    """Owns the replicas; close() (or `with`) frees them.

    Order: attach(), prepare(config), then a Driver for each of `replicas`. A replica has its own
    link, sequence numbers, steps in flight, outcomes, lease keeper and failures. So a daemon's
    death ends nothing in the other replicas, and replacing it does not disturb them. A replica may
    be driven on a thread of its own; calls of this object are made while no replica is in a call.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        parallel: ParallelConfig,
        keys: Keys = NO_KEYS,
        *,
        lease: LeaseTerms | None = None,
    ) -> None:
        """Connect; nothing is sent yet. Endpoint i becomes rank i: those of replica 0 come first.
        keys, lease: see WorkerGroup.

        Raises:
            ClientConfigError: the number of endpoints is not that of all replicas, an endpoint is
                named twice, or one is unusable, or a size is.
        """
        check_fields("parallel", parallel, ParallelConfig)
        if parallel.data_parallel_lockstep:
            problem, fix = "replicas in lockstep are one group", "use WorkerGroup for all of them"
            raise config_error("parallel.data_parallel_lockstep", True, problem, fix)
        parse_endpoints(endpoints, parallel, keys, parallel.data_parallel_size)
        self.parallel = parallel
        self.driver_id = new_driver_id()
        self._endpoints, self._keys, self._lease = tuple(endpoints), keys, lease
        self._is_closed = False
        self.replicas: list[WorkerGroup] = []
        """Groups that Driver takes, by dp_rank."""
        self.loras = ReplicaLoras(self.replicas, self.on_all)
        with contextlib.ExitStack() as opened:
            opened.callback(self.close)
            for dp_rank in range(parallel.data_parallel_size):
                self.replicas.append(self._connected(dp_rank))
            opened.pop_all()

    def __enter__(self) -> "DataParallelGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all replicas, as WorkerGroup.close does."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.ExitStack() as closing:
            for replica in self.replicas:
                closing.callback(replica.close)

    def reconnect(self, dp_rank: int) -> WorkerGroup:
        """Close a replica whose driver has ended, and put one that is not attached in its place;
        return that. It belongs to the calling thread. Raises ClientConfigError: there is no such
        replica."""
        if dp_rank not in range(len(self.replicas)):
            fix = f"use 0 to {len(self.replicas) - 1}"
            raise config_error("dp_rank", dp_rank, "the group has no such replica", fix)
        before, self.replicas[dp_rank] = self.replicas[dp_rank], self._connected(dp_rank)
        with contextlib.suppress(WorkerDaemonError):
            before.close()
        return self.replicas[dp_rank]

    def _connected(self, dp_rank: int) -> WorkerGroup:
        ranks = self.parallel.ranks_of(dp_rank)
        return WorkerGroup(
            self._endpoints[ranks.start : ranks.stop],
            self.parallel,
            self._keys,
            lease=self._lease,
            dp_rank=dp_rank,
            driver_id=self.driver_id,
        )

    def replica_of(self, rank: int) -> WorkerGroup:
        """Return the replica of a global rank. Raises ClientConfigError: there is no such rank."""
        for replica in self.replicas:
            if rank in replica.ranks:
                return replica
        fix = f"use 0 to {self.parallel.world_size_across_dp - 1}"
        raise config_error("rank", rank, "the group has no such rank", fix)

    def attach(
        self,
        timeout_s: float | None = None,
        *,
        wait_for_lease_s: float = LEASE_WAIT_S,
        force: bool = False,
        keep_requests: bool = False,
        wait_s: float = 0.0,
    ) -> list[lc.Status]:
        """Attach to all daemons of all replicas under one epoch, or to none; return their states by
        rank. Options and errors are those of WorkerGroup.attach, and

        Raises:
            ReplicasMissing: daemons do not run; names each replica that lacks one.
        """
        found = attach_together(
            [replica.attachment for replica in self.replicas],
            timeout_s,
            wait_for_lease_s=wait_for_lease_s,
            force=force,
            keep_requests=keep_requests,
            wait_s=wait_s,
        )
        for replica, statuses in zip(self.replicas, found, strict=True):
            replica.weights.learn(statuses)
        return [status for statuses in found for status in statuses]

    def prepare(
        self,
        config: WorkerConfig,
        *,
        num_gpu_blocks: int | None = None,
        fit_max_model_len: bool = False,
        reload: bool = False,
        weights_version: int | None = None,
        content: bytes | None = None,
        on_progress: Callable[[RankProgress], None] | None = None,
    ) -> list[LoadedGroup]:
        """Make all replicas ready to serve `config`, at the same time; return what each has loaded.
        on_progress is called on several threads.
        Replicas may have different numbers of KV blocks. If they hold different weights, since an
        update has reached some of them only, all read them again. Options and errors are those of
        WorkerGroup.prepare, and

        Raises:
            ConfigMismatchError: before any replica loads.
            ContentMismatchError: replicas have read different files; names two ranks.
        """
        check_config(config)
        if not reload:
            for replica in self.replicas:
                first, statuses = replica.ranks[0], replica.get_status()
                check_same_config(config, statuses, first, num_gpu_blocks)
        try:
            loaded = self.on_all(
                lambda replica: replica.prepare(
                    config,
                    num_gpu_blocks=num_gpu_blocks,
                    fit_max_model_len=fit_max_model_len,
                    reload=reload,
                    weights_version=weights_version,
                    content=content,
                    on_progress=on_progress,
                )
            )
        except WorkerDaemonError:
            self._reset_half_loaded()
            raise
        statuses = self.get_status()
        if differing_ranks(statuses) is not None and any(each.was_loaded for each in loaded):
            version = self.next_weights_version
            self.on_all(lambda replica: replica.weights.reload(version=version))
            statuses = self.get_status()
        check_same_weights(statuses, config.model.model)
        return loaded

    @property
    def next_weights_version(self) -> int:
        """Number for the next version of the weights, larger than that of any rank. Give it to an
        update or a reload of all replicas, so that they have the same."""
        weights = [status.weights for status in self.get_status()]
        return 1 + max((each.version for each in weights if each is not None), default=0)

    def on_all(self, operation: Callable[[WorkerGroup], ResultT]) -> list[ResultT]:
        """Do one operation on all replicas at the same time, such as
        `lambda replica: replica.memory.sleep()`; return the results in order.

        It begins on none if one of them refuses operations: a daemon is lost, or the lease is. It
        returns when it has ended on all. If it fails on some, the first one's error is raised, with
        those of the others as notes; after that replicas may differ, as ranks do after an operation
        that fails on some.
        """
        for replica in self.replicas:
            replica.attachment.check_usable()
        return results_of(run_together([partial(operation, each) for each in self.replicas]))

    def on_whole(self, operation: Callable[[WorkerGroup], ResultT]) -> list[ResultT]:
        """Do one operation as on_all does, but without the replicas that have lost a rank, or lose
        one meanwhile. Raises WorkerDied: no other is left."""

        def unless_lost(replica: WorkerGroup) -> ResultT | WorkerDied:
            try:
                replica.attachment.check_usable()
                return operation(replica)
            except WorkerDied as died:
                return died

        outcomes = results_of(run_together([partial(unless_lost, e) for e in self.replicas]))
        results = [each for each in outcomes if not isinstance(each, WorkerDied)]
        losses = [each for each in outcomes if isinstance(each, WorkerDied)]
        if not results:
            raise losses[0]
        return results

    def _reset_half_loaded(self) -> None:
        """Reset replicas that have begun to load and are not ready."""
        for replica in self.replicas:
            with contextlib.suppress(WorkerDaemonError):
                if {status.load for status in replica.get_status()} - {"READY", "CREATED"}:
                    replica.reset("CREATED")

    def replace(
        self, rank: int, endpoint: str | None = None, within_s: float = REPLACE_WITHIN_S
    ) -> ReplacementReport:
        """Replace a lost rank, as WorkerGroup.replace does. Only its replica relinks, under a new
        epoch of its own; the steps in flight of the others stay."""
        return self.replica_of(rank).replace(rank, endpoint, within_s)

    def detach(self) -> None:
        """Detach from all daemons; models stay loaded. A replica that fails does not keep the
        others from being detached."""
        failure: WorkerDaemonError | None = None
        for replica in self.replicas:
            try:
                replica.detach()
            except WorkerDaemonError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """Stop all daemons."""
        for replica in self.replicas:
            replica.shutdown()

    def get_status(self) -> list[lc.Status]:
        """Return every daemon's state, by rank."""
        return [status for replica in self.replicas for status in replica.get_status()]
