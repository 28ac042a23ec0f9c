"""Opens the replicas that a command or a server drives: on running daemons, or on daemons that it
starts, restarts when they die, and ends."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from worker_client.driven_group import DrivenGroup
from worker_client.driver import Recover
from worker_client.errors import WorkerDied
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
        recover = partial(_recover, plan, daemons, threading.Lock())
        replicas = (
            OpenedReplica(
                own,
                model,
                scheduler_limits(model, plan.config, max_itl_ms=plan.max_itl_ms),
                partial(recover, own),
            )
            for own, model in zip(group.replicas, loaded, strict=True)
        )
        yield OpenedReplicas(group, tuple(replicas), seconds)


def _recover(
    plan: DrivenGroup,
    daemons: LocalDaemons | None,
    restarting: threading.Lock,
    group: WorkerGroup,
    died: WorkerDied,
) -> None:
    """Wait until a dead daemon of a replica is restarted, or restart it. restarting: held
    meanwhile."""
    with contextlib.ExitStack() as supervised:
        if daemons is not None:
            supervised.enter_context(restarting)
            supervised.enter_context(daemons.kept_alive())
        group.replace(died.rank, within_s=plan.replace_within_s)
