"""`worker-client serve`: an OpenAI-compatible server, on running daemons or on daemons of its
own."""

import functools
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, Final

import typer

from worker_client.cli.devices import chosen_devices, default_device, placed_ranks
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.prefill_options import PrefillOptions
from worker_client.cli.run_options import RunOptions, takes_run_options
from worker_client.cli.service_options import ServiceOptions
from worker_client.cli.session import download_weights
from worker_client.errors import config_error
from worker_client.inputs.model_source import find_adapter
from worker_client.service.generation_defaults import sampling_defaults
from worker_client.worker_group import parse_endpoints

NOT_SERVED: Final = (
    "prompt",
    "input_",
    "output",
    "max_tokens",
    "restart",
)
"""Options of a run that a server does not have."""
PACKAGES: Final = ("fastapi", "prometheus_client", "uvicorn")
Gpus = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="GPUs to start daemons on; default: all."),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        help="LoRA adapter to serve, below the --lora-root or ORG/NAME[@REVISION]; may be repeated."
    ),
]


def _choose_size(values: dict[str, Any]) -> None:
    """Spread the model over the GPUs, unless an option says otherwise."""
    if values["endpoints"] is None and values["tensor_parallel_size"] is None:
        found = chosen_devices(values["device"] or default_device(), values["gpus"])
        num_others = values["pipeline_parallel_size"] * values["data_parallel_size"]
        values["tensor_parallel_size"], left = divmod(max(len(found), num_others), num_others)
        if left and values["gpus"] is not None:
            problem = f"{len(found)} GPUs cannot be shared out evenly to {num_others} stages"
            fix = f"name a multiple of {num_others} GPUs, or give --tensor-parallel-size"
            raise config_error("gpus", values["gpus"], problem, fix)


@functools.partial(takes_run_options, without=NOT_SERVED, complete=_choose_size)
def serve(
    run: RunOptions,
    *,
    gpus: Gpus = None,
    lora: Adapters = None,
    prefill: PrefillOptions,
    service: ServiceOptions,
) -> None:
    """Serve OpenAI's API until Ctrl-C or SIGTERM, which let running requests end."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        fix = 'pip install "worker-daemon[service]"'
        raise config_error("serve", missing[0], "a package is not installed", fix)
    from worker_client.service.server import serve as serve_group  # FastAPI

    sampling_defaults(run.plan.model.directory, service.generation_config)
    devices, other = _devices(run, gpus), prefill.settings(run.plan)
    with shown_downloads() as show:
        adapters = tuple(
            find_adapter(name, run.plan.lora_root, are_local=not run.plan.endpoints, show=show)
            for name in lora or ()
        )
    settings = replace(service.settings(adapters), prefill=other)
    caches = (each.cache for each in adapters if each.cache is not None)
    plan = replace(run.plan, devices=devices, adapter_cache=next(caches, None))
    if not plan.endpoints:
        download_weights(plan)
    serve_group(plan, settings)


def _devices(run: RunOptions, gpus: str | None) -> tuple[str, ...]:
    """Return the device of each daemon to be started; none on running daemons. Raises
    ClientConfigError."""
    plan = run.plan
    if not plan.endpoints:
        return placed_ranks(run.device, gpus, plan.config.parallel.world_size_across_dp)
    parallel = plan.config.parallel
    parse_endpoints(plan.endpoints, parallel, plan.keys, parallel.data_parallel_size)
    if gpus is not None:
        fix = "leave out one of --gpus and --endpoints"
        raise config_error("gpus", gpus, "daemons that run have their devices", fix)
    return ()
