"""Opens the replicas that a command or a server drives: on running daemons, or on daemons that it
starts, restarts when they die, and ends."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rpc_schema.identity import first_difference
from worker_client.driven_group import DrivenGroup
from worker_client.driver import Recover
from worker_client.errors import ContentMismatchError, WorkerDied
from worker_client.group.loading import LoadedGroup
from worker_client.launcher import LocalDaemons
from worker_client.replicas.group import DataParallelGroup
from worker_client.scheduler import SchedulerLimits, scheduler_limits
from worker_client.worker_group import RankProgress, WorkerGroup


@dataclass(frozen=True, slots=True)
class OpenedReplica:
    """A replica that is ready to serve. Belongs to its driver's thread, until that has ended."""

    group: WorkerGroup
    loaded: LoadedGroup
    limits: SchedulerLimits
    recover: Recover
    """Replaces a dead daemon."""


@dataclass(frozen=True, slots=True)
class OpenedReplicas:
    """All replicas."""

    group: DataParallelGroup
    replicas: tuple[OpenedReplica, ...]
    seconds: dict[str, float]
    """Durations of phases; of what the replicas do at the same time, those of the slowest."""
    reopen: Callable[[int], OpenedReplica]
    """Opens a replica whose driver has ended once more, on the calling thread: see
    _ReplicaOpener.reopen."""

    @property
    def max_model_len(self) -> int:
        """Longest context that all replicas take."""
        return min(each.loaded.max_model_len for each in self.replicas)


@contextlib.contextmanager
def open_replicas(
    plan: DrivenGroup,
    on_progress: Callable[[RankProgress], None] | None = None,
    *,
    keep_requests: bool = False,
) -> Iterator[OpenedReplicas]:
    """Attach to the daemons, started here if there are none, and load the model where they do not
    have it. on_progress is called on several threads, if there are several replicas. keep_requests:
    keep the previous driver's requests. At the end, daemons that ran already keep the model, and
    those started here are ended; errors then have the end of their logs. Raises what LocalDaemons,
    DataParallelGroup.attach and DataParallelGroup.prepare raise."""
    with contextlib.ExitStack() as stack:
        endpoints, daemons, seconds = plan.endpoints, None, dict[str, float]()
        if not endpoints:
            daemons = stack.enter_context(plan.start_daemons())
            stack.enter_context(daemons.naming_causes())
            endpoints, seconds = tuple(daemons.endpoints), dict(daemons.seconds)
        launched = time.monotonic()
        group = stack.enter_context(DataParallelGroup(endpoints, plan.config.parallel, plan.keys))
        group.attach(force=plan.force, keep_requests=keep_requests, wait_s=plan.wait_s)
        seconds["attach"] = time.monotonic() - launched
        loaded = group.prepare(
            plan.config,
            num_gpu_blocks=plan.num_gpu_blocks,
            fit_max_model_len=plan.fit_max_model_len,
            reload=plan.reload,
            content=plan.model.content,
            on_progress=on_progress,
        )
        for phase in {phase: None for model in loaded for phase in model.seconds}:
            seconds[phase] = max(model.seconds.get(phase, 0.0) for model in loaded)
        opener = _ReplicaOpener(plan, group, daemons)
        replicas = map(opener.opened, group.replicas, loaded)
        yield OpenedReplicas(group, tuple(replicas), seconds, opener.reopen)


class _ReplicaOpener:
    """Opens replicas again, and recovers them. Any replica's thread may call it."""

    def __init__(
        self, plan: DrivenGroup, group: DataParallelGroup, daemons: LocalDaemons | None
    ) -> None:
        self._plan = plan
        self._group = group
        self._daemons = daemons
        """Those that were started here."""
        self._restarting = threading.Lock()

    def opened(self, group: WorkerGroup, loaded: LoadedGroup) -> OpenedReplica:
        """Return a replica that is loaded."""

        def recover(died: WorkerDied) -> None:
            with self._supervising():
                group.replace(died.rank, within_s=self._plan.replace_within_s)

        limits = scheduler_limits(loaded, self._plan.config, max_itl_ms=self._plan.max_itl_ms)
        return OpenedReplica(group, loaded, limits, recover)

    def reopen(self, place: int) -> OpenedReplica:
        """Attach to the daemons of a replica once more, without their requests, and load the model
        where they do not have it. Raises what WorkerGroup.attach and WorkerGroup.prepare raise, and

        ContentMismatchError: the files are not those that it had.
        """
        plan, before = self._plan, self._group.replicas[place].weights
        group = self._group.reconnect(place)
        with self._supervising():
            group.attach(wait_s=plan.wait_s)
            loaded = group.prepare(
                before.config or plan.config,
                num_gpu_blocks=plan.num_gpu_blocks,
                fit_max_model_len=plan.fit_max_model_len,
                content=plan.model.content,
            )
        had, has = before.version, group.weights.version
        is_same_version = had is not None and has is not None and had.number == has.number
        if is_same_version and first_difference([each and each.identity for each in (had, has)]):
            raise ContentMismatchError(
                f"replica {place} has read other files than before",
                field="model.model",
                value=plan.config.model.model,
                fix="give it the files that it had, or update the weights of all replicas",
            )
        return self.opened(group, loaded)

    @contextlib.contextmanager
    def _supervising(self) -> Iterator[None]:
        """Restart dead daemons that were started here, in the block; of one replica at a time."""
        if self._daemons is None:
            yield
            return
        with self._restarting, self._daemons.kept_alive():
            yield
