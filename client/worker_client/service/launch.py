"""The group that a server drives: on running daemons, or on daemons that it starts, restarts when
they die, and ends."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rpc_schema.config import WorkerConfig
from worker_client.driver import Recover
from worker_client.errors import WorkerDied
from worker_client.group.loading import LoadedGroup
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.inputs.model_source import ModelSource
from worker_client.inputs.tokenizer import MAX_TEXT_BYTES
from worker_client.launcher import LocalDaemons
from worker_client.wire.keys import NO_KEYS, Keys
from worker_client.worker_group import RankProgress, WorkerGroup


@dataclass(frozen=True, slots=True)
class ServedGroup:
    """The model to serve, and the daemons to serve it on."""

    model: ModelSource
    config: WorkerConfig
    endpoints: tuple[str, ...] = ()
    """Running daemons, in rank order; empty: start one on each of `devices`."""
    devices: tuple[str, ...] = ()
    keys: Keys = NO_KEYS
    lora_root: Path | None = None
    """Directory of the LoRA adapters of daemons that are started."""
    adapter_cache: Path | None = None
    """Hub cache with adapters, for these daemons too."""
    draft: ModelSource | None = None
    """The draft model, if there is one."""
    num_gpu_blocks: int | None = None
    fit_max_model_len: bool = False
    reload: bool = False
    force: bool = False
    wait_s: float = 0.0
    """Time for running daemons to be started."""
    replace_within_s: float = REPLACE_WITHIN_S
    """Time for the successor of a dead daemon."""
    max_text_bytes: int = MAX_TEXT_BYTES
    max_itl_ms: float | None = None
    seed: int | None = None
    """Requests without a seed get one that is derived from it and their number; None: random."""


@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """A group that is ready to serve. Belongs to the driver's thread."""

    group: WorkerGroup
    loaded: LoadedGroup
    recover: Recover
    """Replaces a dead daemon."""


@contextlib.contextmanager
def open_group(
    plan: ServedGroup, on_progress: Callable[[RankProgress], None] | None = None
) -> Iterator[OpenedGroup]:
    """Attach to the daemons, started here if there are none, and load the model if they do not have
    it. At the end, daemons that run already keep it, and those started here are ended. Raises what
    LocalDaemons, WorkerGroup.attach and WorkerGroup.prepare raise."""
    with contextlib.ExitStack() as stack:
        endpoints, daemons = plan.endpoints, None
        if not endpoints:
            daemons = stack.enter_context(
                LocalDaemons(
                    plan.devices,
                    plan.model.model_root,
                    lora_root=plan.lora_root,
                    draft_root=None if plan.draft is None else plan.draft.model_root,
                    adapter_cache=plan.adapter_cache,
                )
            )
            stack.enter_context(daemons.naming_causes())
            endpoints = tuple(daemons.endpoints)
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
