"""`worker-client serve`: an OpenAI-compatible server, on running daemons or on daemons of its
own."""

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from worker_client.cli.downloads import shown_downloads
from worker_client.cli.options import (
    Device,
    RunOptions,
    cuda_devices,
    default_device,
    takes_run_options,
)
from worker_client.cli.session import download_weights
from worker_client.errors import config_error
from worker_client.inputs.model_source import find_adapter
from worker_client.service.generation_defaults import SOURCES, sampling_defaults
from worker_client.service.key_files import read_keys_of
from worker_client.service.launch import ServedGroup
from worker_client.service.settings import (
    DRAIN_S,
    MAX_BODY_BYTES,
    MAX_PROMPTS,
    MAX_QUEUE,
    READ_S,
    WRITE_S,
    ServiceSettings,
)
from worker_client.worker_group import parse_endpoints
from worker_host.log_lines import LOG_FORMATS

NOT_SERVED: Final = (
    "data_parallel_size",
    "prompt",
    "input_",
    "output",
    "max_tokens",
    "restart",
)
"""Options of a run that a server does not have."""
PACKAGES: Final = ("fastapi", "prometheus_client", "uvicorn")
TOOL_FORMS: Final = ("hermes", "llama3_json", "mistral")


def _devices(device: Device, gpus: str | None) -> list[str]:
    """Return the devices that daemons can be started on: the GPUs that were named, or all, or the
    CPU. Raises ClientConfigError."""
    if device is Device.CPU:
        if gpus is not None:
            fix = "leave out --gpus, or --device cpu"
            raise config_error("gpus", gpus, "the device is the CPU", fix)
        return ["cpu"]
    if gpus is not None:
        names = [name.strip() for name in gpus.split(",")]
        if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
            fix = "give their indices, each once, as in 0,1"
            raise config_error("gpus", gpus, "these are no GPUs", fix)
        return [f"cuda:{name}" for name in names]
    return cuda_devices()


def _choose_size(values: dict[str, Any]) -> None:
    """Spread the model over the GPUs, unless an option says otherwise."""
    if values["endpoints"] is None and values["tensor_parallel_size"] is None:
        found = _devices(values["device"] or default_device(), values["gpus"])
        values["tensor_parallel_size"] = max(1, len(found) // values["pipeline_parallel_size"])


@functools.partial(takes_run_options, without=NOT_SERVED, complete=_choose_size)
def serve(
    run: RunOptions,
    host: Annotated[
        str, typer.Option(envvar="WORKER_CLIENT_HOST", help="Address to listen at.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, envvar="WORKER_CLIENT_PORT", help="0: a free one."),
    ] = 8000,
    gpus: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="GPUs to start daemons on; default: all."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of the model in requests; may be repeated. Default: its directory's or "
            "repository's."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            help="LoRA adapter to serve, below the --lora-root or ORG/NAME[@REVISION]; may be "
            "repeated."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="WORKER_CLIENT_API_KEY",
            help="Key that clients must send. Other users of the host can read a command line: "
            "prefer the variable, or --api-key-file.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar="WORKER_CLIENT_API_KEY_FILE", help="File of such keys, one a line."),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar="WORKER_CLIENT_ADMIN_KEY", help="Key of administrators."),
    ] = None,
    admin_key_file: Annotated[
        Path | None,
        typer.Option(envvar="WORKER_CLIENT_ADMIN_KEY_FILE", help="File of such keys."),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            help=f"How the model writes calls of tools: {', '.join(TOOL_FORMS)}. Default: as its "
            "chat template shows."
        ),
    ] = "",
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling defaults of requests: auto (those of the model's "
            "generation_config.json) or none."
        ),
    ] = SOURCES[0],
    max_queue: Annotated[
        int, typer.Option(min=0, help="Samples that may wait beyond --max-num-seqs.")
    ] = MAX_QUEUE,
    max_prompts: Annotated[int, typer.Option(min=1, help="Prompts in one body.")] = MAX_PROMPTS,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Bytes of a body.")] = MAX_BODY_BYTES,
    read_timeout: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Time for a body to arrive.")
    ] = READ_S,
    write_timeout: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Time for a client to read what is sent."),
    ] = WRITE_S,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Time after which a request ends with an error."
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(
            "--drain-s", min=0.0, metavar="SECONDS", help="Time for running requests at the end."
        ),
    ] = DRAIN_S,
    log_format: Annotated[
        str, typer.Option(envvar="WORKER_CLIENT_LOG_FORMAT", help=", ".join(LOG_FORMATS))
    ] = LOG_FORMATS[0],
) -> None:
    """Serve OpenAI's API until Ctrl-C or SIGTERM, which let running requests end."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        fix = 'pip install "worker-daemon[service]"'
        raise config_error("serve", missing[0], "a package is not installed", fix)
    from worker_client.service.server import serve as serve_group  # FastAPI

    sampling_defaults(run.model.directory, generation_config)
    devices: tuple[str, ...] = ()
    if run.endpoints:
        parse_endpoints(run.endpoints, run.config.parallel, run.keys, 1)
        if gpus is not None:
            fix = "leave out one of --gpus and --endpoints"
            raise config_error("gpus", gpus, "daemons that run have their devices", fix)
    else:
        devices = _placed(run, gpus)
    with shown_downloads() as show:
        adapters = tuple(
            find_adapter(name, run.lora_root, are_local=not run.endpoints, show=show)
            for name in lora or ()
        )
    settings = ServiceSettings(
        host=host,
        port=port,
        names=tuple(served_model_name or ()),
        adapters=adapters,
        api_keys=read_keys_of("api_key", api_key, api_key_file),
        admin_keys=read_keys_of("admin_key", admin_key, admin_key_file),
        tool_call_parser=_tool_form(tool_call_parser),
        generation_config=generation_config,
        max_body_bytes=max_body_bytes,
        max_prompts=max_prompts,
        max_queue=max_queue,
        read_s=read_timeout,
        write_s=write_timeout,
        request_s=request_timeout,
        drain_s=drain_s,
        log_format=log_format,
    )
    plan = ServedGroup(
        model=run.model,
        config=run.config,
        endpoints=run.endpoints,
        devices=devices,
        keys=run.keys,
        lora_root=run.lora_root,
        adapter_cache=next((each.cache for each in adapters if each.cache is not None), None),
        draft=run.draft,
        num_gpu_blocks=run.num_gpu_blocks,
        fit_max_model_len=run.fit_max_model_len,
        reload=run.reload,
        force=run.force,
        wait_s=run.wait_s,
        replace_within_s=run.replace_within_s,
        max_text_bytes=run.max_text_bytes,
        max_itl_ms=run.max_itl_ms,
        seed=run.seed,
    )
    if not run.endpoints:
        download_weights(run)
    serve_group(plan, settings)


def _tool_form(given: str) -> str:
    if given and given not in TOOL_FORMS:
        fix = f"use one of {', '.join(TOOL_FORMS)}"
        raise config_error("tool_call_parser", given, "there is no such form", fix)
    return given


def _placed(run: RunOptions, gpus: str | None) -> tuple[str, ...]:
    """Return the device of each rank's daemon. Raises ClientConfigError: there are too few."""
    found, size = _devices(run.device, gpus), run.config.parallel.world_size
    if run.device is Device.CPU:
        return ("cpu",) * size
    if size > len(found):
        problem = f"{size} ranks need as many GPUs, and there are {len(found)}"
        fix = "use smaller parallel sizes, or --endpoints of daemons on several hosts"
        raise config_error("gpus", gpus, problem, fix)
    return tuple(found[:size])
