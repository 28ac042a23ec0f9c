"""The group that a server drives: on running daemons, or on daemons that it starts, restarts when
they die, and ends."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from worker_client.driven_group import DrivenGroup
from worker_client.driver import Recover
from worker_client.errors import WorkerDied
from worker_client.group.loading import LoadedGroup
from worker_client.launcher import LocalDaemons
from worker_client.replicas.group import DataParallelGroup
from worker_client.worker_group import RankProgress, WorkerGroup


@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """A group that is ready to serve. Belongs to the driver's thread."""

    group: WorkerGroup
    loaded: LoadedGroup
    recover: Recover
    """Replaces a dead daemon."""


@contextlib.contextmanager
def open_group(
    plan: DrivenGroup, on_progress: Callable[[RankProgress], None] | None = None
) -> Iterator[OpenedGroup]:
    """Attach to the daemons, started here if there are none, and load the model if they do not have
    it. At the end, daemons that run already keep it, and those started here are ended. Raises what
    LocalDaemons, WorkerGroup.attach and WorkerGroup.prepare raise."""
    with contextlib.ExitStack() as stack:
        endpoints, daemons = _reach_daemons(plan, stack)
        group = stack.enter_context(WorkerGroup(endpoints, plan.config.parallel, plan.keys))
        group.attach(force=plan.force, wait_s=plan.wait_s)
        loaded = group.prepare(
            plan.config,
            num_gpu_blocks=plan.num_gpu_blocks,
            fit_max_model_len=plan.fit_max_model_len,
            reload=plan.reload,
            content=plan.model.content,
            on_progress=on_progress,
        )

        def recover(died: WorkerDied) -> None:
            with contextlib.nullcontext() if daemons is None else daemons.kept_alive():
                group.replace(died.rank, within_s=plan.replace_within_s)

        yield OpenedGroup(group, loaded, recover)


@contextlib.contextmanager
def open_replicas(
    plan: DrivenGroup, on_progress: Callable[[RankProgress], None] | None = None
) -> Iterator[list[OpenedGroup]]:
    """Open the groups of all replicas, as open_group opens one. on_progress is called on several
    threads. Afterwards each belongs to the thread of its driver, until all of these have ended.
    Raises what LocalDaemons, DataParallelGroup.attach and DataParallelGroup.prepare raise."""
    with contextlib.ExitStack() as stack:
        endpoints, daemons = _reach_daemons(plan, stack)
        group = stack.enter_context(DataParallelGroup(endpoints, plan.config.parallel, plan.keys))
        group.attach(force=plan.force, wait_s=plan.wait_s)
        loaded = group.prepare(
            plan.config,
            num_gpu_blocks=plan.num_gpu_blocks,
            fit_max_model_len=plan.fit_max_model_len,
            reload=plan.reload,
            content=plan.model.content,
            on_progress=on_progress,
        )
        restarting = threading.Lock()

        def recover(replica: WorkerGroup, died: WorkerDied) -> None:
            with contextlib.ExitStack() as supervised:
                if daemons is not None:
                    supervised.enter_context(restarting)
                    supervised.enter_context(daemons.kept_alive())
                replica.replace(died.rank, within_s=plan.replace_within_s)

        pairs = zip(group.replicas, loaded, strict=True)
        yield [OpenedGroup(own, model, partial(recover, own)) for own, model in pairs]


def _reach_daemons(
    plan: DrivenGroup, stack: contextlib.ExitStack
) -> tuple[tuple[str, ...], LocalDaemons | None]:
    """Return the endpoints of daemons that run, or of those that are started here until the stack
    is closed, and these."""
    if plan.endpoints:
        return plan.endpoints, None
    daemons = stack.enter_context(plan.start_daemons())
    stack.enter_context(daemons.naming_causes())
    return tuple(daemons.endpoints), daemons
