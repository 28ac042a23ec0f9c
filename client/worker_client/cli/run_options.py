"""The checked options of a run, and the commands that take them."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec import structs

from rpc_schema.config import GraphConfig, WorkerConfig
from worker_client.cli.devices import Device, default_device, default_devices
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.options import (
    ConfigFile,
    expanded,
    from_environment,
    parameters_of,
    take_group,
    with_options,
)
from worker_client.cli.run_option_groups import (
    DEFAULT_MAX_TOKENS,
    CacheOptions,
    DaemonOptions,
    DraftOptions,
    LoraOptions,
    ModelOptions,
    ParallelOptions,
    RequestOptions,
    StepOptions,
)
from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import ModelSource, find_model

GROUPS: Final = (
    ModelOptions,
    DaemonOptions,
    ParallelOptions,
    StepOptions,
    DraftOptions,
    CacheOptions,
    LoraOptions,
    RequestOptions,
)
"""All options of a run, in the order of --help."""
_LINE_ONLY: Final = ("force", "prompt", "input_", "output", "max_tokens")
"""Options without an environment variable."""
_CONFIG: Final = inspect.Parameter(
    "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile
)
"""Source of defaults: in no group, as nothing is built from it."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Checked options of generate and bench."""

    plan: DrivenGroup
    device: Device
    """Device of local daemons."""
    restart: bool = False
    prompts: tuple[str, ...] = ()
    input: Path | None = None
    output: Path | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Applies to each prompt."""


def build_run_options(**values: Any) -> RunOptions:
    """Check the options of GROUPS, given by name, and put them into a worker configuration.

    Downloads the small files of models that are named by their repositories, once all else is
    found to be valid.

    Raises:
        ClientConfigError: one of them is invalid.
        HubModelError: a repository cannot be read.
        TypeError: no group has such an option.
    """
    model, daemons = take_group(ModelOptions, values), take_group(DaemonOptions, values)
    parallel, steps = take_group(ParallelOptions, values), take_group(StepOptions, values)
    drafts, cache = take_group(DraftOptions, values), take_group(CacheOptions, values)
    loras, requests = take_group(LoraOptions, values), take_group(RequestOptions, values)
    if values:
        raise TypeError(f"no group has the options {sorted(values)}")
    config = WorkerConfig(
        parallel=parallel.config(),
        model=model.config(),
        scheduler=steps.config(),
        cache=cache.config(),
        graph=GraphConfig(enforce_eager=steps.enforce_eager),
        lora=loras.config(),
        speculative=drafts.config(),
    )
    endpoints, keys, interval = daemons.running(), daemons.keys(), model.step_interval
    found, draft = _find_models(model, drafts)
    config = structs.replace(config, model=structs.replace(config.model, model=found.sent_as))
    if draft is not None:
        speculative = structs.replace(config.speculative, model=draft.sent_as)
        config = structs.replace(config, speculative=speculative)
    device = daemons.device or default_device()
    plan = DrivenGroup(
        model=found,
        config=config,
        endpoints=endpoints,
        devices=() if endpoints else default_devices(device, config.parallel),
        keys=keys,
        lora_root=loras.lora_root,
        draft=draft,
        num_gpu_blocks=cache.num_gpu_blocks,
        fit_max_model_len=model.is_fitted,
        reload=daemons.reload,
        force=daemons.force,
        wait_s=daemons.wait,
        replace_within_s=daemons.replace_within,
        max_text_bytes=requests.max_text_bytes,
        max_itl_ms=steps.max_itl_ms,
        eplb_step_interval=interval,
        seed=model.seed,
    )
    return RunOptions(
        plan=plan,
        device=device,
        restart=daemons.restart,
        prompts=tuple(requests.prompt or ()),
        input=requests.input_,
        output=requests.output,
        max_tokens=requests.max_tokens,
    )


def _find_models(
    model: ModelOptions, drafts: DraftOptions
) -> tuple[ModelSource, ModelSource | None]:
    """Return the model and the draft model; shows what is downloaded."""
    with shown_downloads() as show:
        found = find_model(model.model, show=show)
        if drafts.speculative_model is None:
            return found, None
        return found, find_model(drafts.speculative_model, "speculative_model", show)


def takes_run_options(
    command: Callable[..., None],
    *,
    without: Collection[str] = (),
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Callable[..., None]:
    """Return a command with the options of GROUPS, --config and its own. The wrapped function gets
    a RunOptions as its first argument; where another one is a group, it gets that group, made of
    the options that are its fields. without: options that it does not have. complete: is called
    with the values of all, and may change those of GROUPS."""
    shared = [
        entry if entry.name in _LINE_ONLY else from_environment(entry)
        for group in GROUPS
        for entry in parameters_of(group)
        if entry.name not in without
    ]
    own, groups = expanded(list(inspect.signature(command).parameters.values())[1:])

    @functools.wraps(command)
    def run(**values: Any) -> None:
        del values[_CONFIG.name]  # its callback has read it
        complete(values)
        options = build_run_options(**{entry.name: values.pop(entry.name) for entry in shared})
        taken = {name: take_group(group, values) for name, group in groups.items()}
        command(options, **taken, **values)

    return with_options(run, [*shared, _CONFIG, *own])
