"""Replaces a lost rank by another daemon: fences the survivors off from the lost one, waits for the
new one, relinks all, and loads the new one. `outcomes.py` reports the lost requests."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema.config import WorkerConfig
from rpc_schema.errors import (
    CapacityError,
    CommError,
    DeviceError,
    FencedError,
    InternalError,
    LeaseExpiredError,
    NotAttachedError,
    ShuttingDownError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.expert_placement import ExpertPlacement
from rpc_schema.operations import StepMessage
from worker_client.errors import (
    ClientError,
    DeadlineExceeded,
    LeaseNotRenewed,
    ReplacementFailed,
    WorkerDied,
    WorkerShutsDown,
)
from worker_client.group.attaching import Attachment
from worker_client.group.experts import present_placements
from worker_client.group.failure_state import Change, FailureState, RankLost
from worker_client.group.group_channel import GroupChannel
from worker_client.group.group_daemons import obstacle_to
from worker_client.group.load_chain import LoadChain, init_device
from worker_client.group.loading import LoadedGroup, Stopwatch, config_differences
from worker_client.group.outcomes import StepsInFlight
from worker_client.wire.endpoint import Endpoint

REPLACE_WITHIN_S = 60.0
"""Default wait for a successor. A supervisor restarts a daemon, and the daemon loads torch, in far
less time."""

REPLACE_ATTEMPTS = 3
"""Attempts, each ended by the loss of a rank, after which replace() gives up."""

MEMORY_PAUSE_S = 1.0
"""A killed process's device memory may become free only some time after its end."""

_PAUSE_S = 0.02
_AWAY = ("asleep", "discarded")

_Tags: TypeAlias = Mapping[lc.MemoryTag, lc.TagState]
_Statuses: TypeAlias = Mapping[int, lc.Status]
"""By rank."""
_Build: TypeAlias = partial[lc.Sleep] | partial[lc.WakeUp] | partial[lc.Discard]


@dataclass(frozen=True, slots=True)
class ReplacementReport:
    """Result of a replacement."""

    ranks: tuple[int, ...]
    """Ranks with another daemon, or with the same one after it was given up."""
    loaded_ranks: tuple[int, ...]
    """Ranks that had to load their shard, including ranks that stayed and were not ready."""
    seconds: dict[str, float]
    """Durations of phases of the successful attempt: fence, wait, attach, link, load, warm_up. If
    ranks had to be reset or woken, clear; if they sleep again, sleep, wake_up or discard."""
    statuses: list[lc.Status] = field(repr=False)
    """States of the daemons at attach."""


_PASSING = (
    WorkerDied,
    CommError,
    FencedError,
    LeaseExpiredError,
    LeaseNotRenewed,
    NotAttachedError,
    DeadlineExceeded,
    CapacityError,
    DeviceError,
    InternalError,
    ShuttingDownError,
)
"""Errors after which another attempt may succeed."""


@dataclass(slots=True)
class Replacement:
    """One call of replace(). Used on the group's thread."""

    channel: GroupChannel
    attaching: Attachment
    steps: StepsInFlight
    state: FailureState
    config: WorkerConfig
    """That of the group; once it is attached, of the ranks that stayed, which a reload may have
    changed."""
    model: LoadedGroup
    """Served by the group, under `config`."""
    weights_version: int | None
    """Number of the weights that a new rank reads from files, as those that stayed have; None if
    theirs are not of files."""
    finish_switches: Callable[[Sequence[lc.Status]], None]
    """Bring all ranks to one placement of experts."""
    clock: Stopwatch = field(default_factory=Stopwatch)
    vacant: dict[int, Endpoint] = field(default_factory=dict)
    memory: _Tags | None = None
    """Memory that the ranks are brought back to, {} for all that they have; None: that of the ranks
    that stayed, as the first attempt finds it."""

    def run(self, rank: int, endpoint: Endpoint | None, within_s: float) -> ReplacementReport:
        """See WorkerGroup.replace."""
        deadline = time.monotonic() + within_s
        own = self.channel.daemons.client(rank).endpoint
        self.vacant = {rank: own if endpoint is None else endpoint}
        cause = self.state.cause or ClientError(f"rank {rank} was given up")
        self.channel.daemons.watch.mark_dead(rank)
        self.channel.lose(self.channel.daemons.watch.death_of(rank))
        try:
            for _ in range(REPLACE_ATTEMPTS):
                try:
                    replaced = self._fill(deadline, within_s)
                except _PASSING as error:
                    cause = self._refresh_statuses(error)
                else:
                    self.steps.revive()
                    return replaced
            raise ReplacementFailed(
                max(self.vacant),
                f"ranks were lost {REPLACE_ATTEMPTS} times in a row during the replacement; "
                f"the last time: {cause}",
            ) from cause
        except BaseException as error:
            self.channel.abort_links(f"a replacement failed: {error}")
            lost = self.channel.daemons.watch.death_of(max(self.vacant))
            self.state.apply(RankLost(lost))
            raise

    def _refresh_statuses(self, error: WorkerDaemonError) -> WorkerDaemonError:
        """Find further losses after a failed attempt; return the reason for the failure."""
        if isinstance(error, WorkerShutsDown):
            self.channel.daemons.watch.shuts_down(error.rank)
        try:
            if self.state.is_end_announced:
                self.channel.await_announced_end()
            self.channel.check_deaths()
        except WorkerDied as died:
            error = died
        except (WorkerError, LeaseNotRenewed):
            pass  # the lease is lost: the next attempt asks for it again
        if isinstance(error, CapacityError):
            time.sleep(MEMORY_PAUSE_S)
        self.channel.abort_links(str(error))
        if isinstance(error, WorkerDied):
            self.channel.lose(error)
            own = self.channel.daemons.client(error.rank).endpoint
            self.vacant.setdefault(error.rank, own)
        for client in self.channel.daemons.clients:  # perhaps several
            if self.channel.daemons.watch.is_dead(client.rank):
                self.vacant.setdefault(client.rank, client.endpoint)
        return error

    def _fill(self, deadline: float, within_s: float) -> ReplacementReport:
        channel = self.channel
        self.clock = Stopwatch()
        self.state.apply(Change.REPLACE_BEGUN)
        channel.daemons.absent = frozenset(self.vacant)
        with self.clock.phase("fence"):
            if channel.daemons.present:
                self.attaching.attach_present()
            else:
                channel.lease.drop()
        with self.clock.phase("wait"):
            for rank, endpoint in self.vacant.items():
                self._wait_for(rank, endpoint, deadline, within_s)
        with self.clock.phase("attach"):
            for rank, endpoint in self.vacant.items():
                channel.daemons.move(rank, endpoint)
                channel.links.numbers[rank] = 0
            channel.daemons.absent = frozenset()
            statuses = self.attaching.attach_present()
        by_rank = dict(zip(channel.daemons.ranks, statuses, strict=True))
        self.config = self._config_of_others(by_rank)
        newcomers = tuple(
            rank for rank, status in by_rank.items() if not self._can_stay(rank, status)
        )
        self._remember_memory(newcomers, by_rank)
        self._free_memory_for_load(newcomers, by_rank)
        self._link(newcomers)
        if newcomers:
            stayed = [each for rank, each in by_rank.items() if rank not in newcomers]
            self._load(newcomers, present_placements(stayed))
        self._put_memory_back()
        return ReplacementReport(tuple(self.vacant), newcomers, self.clock.seconds, statuses)

    def _wait_for(self, rank: int, endpoint: Endpoint, deadline: float, within_s: float) -> None:
        """Wait until a daemon answers there that takes drivers: the lost one may do neither, or be
        about to end. Watch the others meanwhile."""
        with closing(self.channel.daemons.new_client(rank, endpoint)) as client:
            while (obstacle := obstacle_to(client)) is not None:
                self.channel.look()
                if time.monotonic() >= deadline:
                    raise ReplacementFailed(
                        rank,
                        f"{obstacle} at {endpoint.control} within {within_s:g} s: rank {rank} is "
                        "not replaced; fix: start its successor there, or undo an operator's "
                        "drain (worker-client drain --undo), then try again",
                    )
                time.sleep(_PAUSE_S)

    def _config_of_others(self, statuses: _Statuses) -> WorkerConfig:
        """Return what the ranks that stayed have loaded: a new rank reads the same files."""
        held = [
            status.config
            for rank, status in statuses.items()
            if rank not in self.vacant and status.load == "READY" and status.config is not None
        ]
        return held[0] if held else self.config

    def _can_stay(self, rank: int, status: lc.Status) -> bool:
        """Return True if a daemon need not load. Ranks that stayed have the group's model, unless
        they were reset."""
        if rank in self.vacant:
            return self._has_all(rank, status)
        return status.load == "READY"

    def _has_all(self, rank: int, status: lc.Status) -> bool:
        """Return True if a daemon is ready as it is: it may have been given up too early."""
        return (
            status.load == "READY"
            and status.rank == rank
            and not config_differences(self.config, status)
            and status.kv_cache is not None
            and status.kv_cache.num_blocks == self.model.num_blocks
        )

    def _remember_memory(self, newcomers: Sequence[int], statuses: _Statuses) -> None:
        """Record the memory tags of the ranks that stayed, at the first attempt: a failed attempt
        leaves them awake."""
        others = [status for rank, status in statuses.items() if rank not in newcomers]
        if self.memory is None and others:
            self.memory = _common_tags(others)

    def _free_memory_for_load(self, newcomers: Sequence[int], statuses: _Statuses) -> None:
        """Reset newcomers that have something else loaded, and wake the others: links, graphs and
        warm-up need their memory."""
        occupied = [rank for rank in newcomers if statuses[rank].load != "CREATED"]
        asleep = [
            rank
            for rank, status in statuses.items()
            if rank not in newcomers and _is_away(status.memory_tags)
        ]
        if not occupied and not asleep:
            return

        def build_for(rank: int) -> Callable[..., StepMessage]:
            if rank in newcomers:
                return partial(lc.Reset, to="CREATED")
            return partial(lc.WakeUp, tags=None) if rank in asleep else lc.GetSupportedTasks

        with self.clock.phase("clear"):
            self.channel.ask_each(build_for)
            self.channel.refresh_links()

    def _put_memory_back(self) -> None:
        """Bring all ranks back to the tags of those that stayed."""
        for operation, build in _way_back(self.memory or {}):
            with self.clock.phase(operation):
                self.channel.ask(build)

    def _link(self, newcomers: Sequence[int]) -> None:
        """Bring all ranks to the same rendezvous, by InitDevice or Relink."""
        with self.clock.phase("link"):
            rendezvous = self.channel.open_rendezvous()

            def build_for(rank: int) -> Callable[..., StepMessage]:
                if rank not in newcomers:
                    return partial(
                        lc.Relink, rendezvous=rendezvous[rank], warm_up_follows=bool(newcomers)
                    )
                return init_device(self.config, rendezvous[rank])

            self.channel.ask_each(build_for)
            self.channel.use_link(rendezvous)

    def _load(self, newcomers: Sequence[int], placements: Sequence[ExpertPlacement]) -> None:
        """Load the new ranks alone, with the others' placements of experts; then warm all up, since
        they compute together."""
        model, everyone = self.model, LoadChain(self.channel)
        alone = LoadChain(self.channel, newcomers)
        with self.clock.phase("load"):
            alone.load_model(self.config, self.weights_version, expert_placements=placements)
            alone.update_max_model_len(model.max_model_len)
            alone.initialize_from_config(model.kv_cache)
            alone.initialize_cache(model.num_blocks)
        self.finish_switches(self.channel.daemons.get_status())
        with self.clock.phase("warm_up"):
            everyone.compile_or_warm_up_model()


def _is_away(tags: _Tags) -> bool:
    """Return True if some memory is not mapped: steps, warm-up and graphs need all of it."""
    return any(state in _AWAY for state in tags.values())


def _common_tags(statuses: Sequence[lc.Status]) -> _Tags:
    """Return the tags of all these ranks; nothing if they differ, or there are none. Ranks that
    differ were not brought there by an operation that succeeded."""
    tags = [status.memory_tags for status in statuses]
    return tags[0] if tags and all(each == tags[0] for each in tags) else {}


def _way_back(tags: _Tags) -> list[tuple[str, _Build]]:
    """Return the operations, by name, that bring ranks from awake to these tags. A KV cache that
    was asleep is discarded: it had no content."""
    if tags.get("weights") == "asleep":
        operations: list[tuple[str, _Build]] = [("sleep", partial(lc.Sleep, level=1))]
        if tags["kv_cache"] not in _AWAY:
            operations.append(("wake_up", partial(lc.WakeUp, tags=("kv_cache",))))
        return operations
    gone = tuple(tag for tag, state in tags.items() if state in _AWAY)
    return [("discard", partial(lc.Discard, tags=gone))] if gone else []
