"""The command line `worker-daemon`: turns options into settings, and errors into exit codes."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer
from typer.core import TyperGroup

from rpc_schema.config import (
    FIT_MAX_MODEL_LEN,
    CacheConfig,
    GraphConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.errors import CapacityError, CheckpointError, ConfigError
from rpc_schema.version import version_line
from worker_daemon.device.nvml import CudaDevice, load_nvml, total_memory_bytes
from worker_daemon.errors import StartLaterError
from worker_daemon.logs import configure_logs
from worker_daemon.server.auth.keygen import make_key_files
from worker_daemon.server.gpu_lock import GpuInUseError
from worker_daemon.server.wire.endpoints import EndpointInUseError
from worker_daemon.settings import (
    early_log_format,
    journal_stream,
    load_settings,
    own_environment,
    prepare_environment,
    prepare_kernel_cache,
    read_sources,
)
from worker_daemon.shown_settings import show_settings
from worker_host.exit_codes import ExitCode

# Without rich, help and errors are plain text: option names are not truncated and errors not
# wrapped.
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_WORKER_MODULES: Final = ("torch", "uvloop", "pynvml")
"""Packages of the extra `worker` that every device needs. Triton's kernels need CUDA."""


def _check_worker_extra() -> None:
    """Raise ConfigError if a package of the extra is missing. Imports none."""
    missing = [name for name in _WORKER_MODULES if find_spec(name) is None]
    if missing:
        problem = f"the extra `worker` is not installed: no module {', '.join(missing)}"
        raise ConfigError(problem, fix='pip install "worker-daemon[worker]"')


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Log an error that the operator can fix, and end with its exit code."""
    try:
        yield
    except (ConfigError, CapacityError) as error:
        logging.getLogger(__name__).error("%s", error, extra={"event": "refused"})
        if isinstance(error, EndpointInUseError | GpuInUseError):
            raise typer.Exit(ExitCode.IN_USE) from None
        if isinstance(error, StartLaterError):
            raise typer.Exit(ExitCode.RETRY_LATER) from None
        is_data = isinstance(error, CheckpointError)
        raise typer.Exit(ExitCode.BAD_DATA if is_data else ExitCode.CONFIG) from None


def _start_logs(log_format: str) -> None:
    """Log in a format from the start; errors of the format itself are text."""
    configure_logs("info", journal_stream())
    with _exit_codes():
        configure_logs("info", journal_stream(), log_format)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(version_line("worker-daemon"))
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="show versions and end"
        ),
    ] = False,
) -> None:
    """A GPU worker for LLM inference that runs as a daemon."""


@app.command()
def serve(
    endpoint: Annotated[
        str | None, typer.Option(help="ipc:///DIR/NAME or, with keys, tcp://ADDRESS:PORT")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda:N")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these options")] = None,
    state_dir: Annotated[
        str | None,
        typer.Option(
            help="keeps epochs and compiled kernels; default: the endpoint's directory, and the "
            "user's cache directory"
        ),
    ] = None,
    model_root: Annotated[
        list[str] | None,
        typer.Option(
            help="models must be under one of these; default: the working directory; needed on tcp"
        ),
    ] = None,
    lora_root: Annotated[
        list[str] | None,
        typer.Option(help="LoRA adapters must lie under one of these; default: none are served"),
    ] = None,
    save_root: Annotated[
        str | None,
        typer.Option(help="directory for saved weights, by name; without it, saving is refused"),
    ] = None,
    profile_dir: Annotated[
        str | None,
        typer.Option(
            help="directory for traces; default: profiles/ in the state directory or cache"
        ),
    ] = None,
    key_file: Annotated[
        str | None,
        typer.Option(help="the daemon's secret file, or credential:NAME; needed on tcp"),
    ] = None,
    authorized_keys: Annotated[
        str | None,
        typer.Option(help="JSON file of the authorized keys and their roles"),
    ] = None,
    data_interface: Annotated[
        str | None,
        typer.Option(help="network interface of the ranks' data; default: lo; needed on tcp"),
    ] = None,
    gpu_lock_dir: Annotated[
        str | None,
        typer.Option(help="directory of this host's GPU locks; default: /run/lock, or /tmp"),
    ] = None,
    share_gpu: Annotated[
        bool, typer.Option("--share-gpu", help="another daemon may have the same GPU")
    ] = False,
    allow_download: Annotated[
        bool,
        typer.Option(
            "--allow-download", help="download models that drivers name into the user's hub cache"
        ),
    ] = False,
    upload_memory_bytes: Annotated[
        int | None,
        typer.Option(help="host memory for a driver's uploads, at most; default: 2 GiB"),
    ] = None,
    max_kv_host_memory_bytes: Annotated[
        int | None,
        typer.Option(help="host memory for KV blocks, at most; default: what the host has free"),
    ] = None,
    kv_host_dir: Annotated[
        str | None,
        typer.Option(
            help="leave KV blocks in host memory to the next daemon, by a file in this directory "
            "of a tmpfs; default: they end with the daemon"
        ),
    ] = None,
    kv_file_dir: Annotated[
        str | None,
        typer.Option(help="keep files of KV blocks in this directory; default: none are kept"),
    ] = None,
    kv_file_bytes: Annotated[
        int | None,
        typer.Option(help="size of these files, at most; default: 16 GiB"),
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            help="serve metrics and health over HTTP at unix:/DIR/NAME or, with a token, at "
            "ADDRESS:PORT; default: nowhere"
        ),
    ] = None,
    metrics_token_file: Annotated[
        str | None,
        typer.Option(
            help="file with the bearer token for --metrics-listen ADDRESS:PORT, or credential:NAME"
        ),
    ] = None,
    reset_epoch: Annotated[
        bool,
        typer.Option(
            "--reset-epoch", help="replace a stored epoch that is damaged or far too high"
        ),
    ] = False,
    exit_with_parent_fd: Annotated[
        int | None, typer.Option(help="end when this descriptor reads end-of-file")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
    log_format: Annotated[str | None, typer.Option(help="text, json or journald")] = None,
) -> None:
    """Serve one device until told to stop.

    Each option may also come from the environment (WORKER_DAEMON_ENDPOINT, ...) or from the file,
    in this order of precedence.
    """
    given = {name.replace("_", "-"): value for name, value in locals().items() if name != "config"}
    _start_logs(early_log_format(log_format))
    with _exit_codes():
        _check_worker_extra()
        from worker_daemon.server.assembly import run_daemon  # it needs the extra

        settings = load_settings(given, config)
        configure_logs(settings.log_level, journal_stream(), settings.log_format)
        prepare_kernel_cache(settings)
        raise typer.Exit(run_daemon(settings))


config_app = typer.Typer(no_args_is_help=True)
app.add_typer(config_app, name="config", short_help="Show settings and their origins.")


@config_app.command(
    "show",
    short_help="Show each setting of serve, its value and its origin.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def show_config(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="TOML file with options of serve")] = None,
) -> None:
    """Show each setting of `serve`, its value and its origin: argument, environment, file or
    default. Takes the options of `serve`; starts nothing, and makes no file."""
    root = context.find_root().command
    assert isinstance(root, TyperGroup)
    with root.commands["serve"].make_context("serve", list(context.args)) as serving:
        values = serving.params.items()
    given = {
        name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
        for name, value in values
        if name != "config"
    }
    configure_logs("info")
    with _exit_codes():
        sys.stdout.write(show_settings(read_sources(given, config)))


@app.command(short_help="Make a key pair for a daemon or a driver.")
def keygen(
    out: Annotated[Path, typer.Option(help="DIR/NAME: makes NAME.key and NAME.pub there")],
) -> None:
    """Make a key pair for a daemon or a driver; prints the public key, overwrites nothing."""
    configure_logs("info")
    with _exit_codes():
        made = make_key_files(out)
    sys.stdout.write(f"{made.public_key}\n")


@app.command(short_help="Print the memory plan of a group of daemons.")
def plan(
    model: Annotated[
        str, typer.Option(help="checkpoint directory, or a repository: ORG/NAME[@REVISION]")
    ],
    pipeline_parallel_size: Annotated[int, typer.Option(help="pipeline stages")] = 1,
    tensor_parallel_size: Annotated[int, typer.Option(help="ranks of a stage")] = 1,
    layer_partition: Annotated[
        str | None, typer.Option(help="layers of each stage: N,N,...; default: even")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto",
    quantization: Annotated[
        str, typer.Option(help="auto; fp8 quantizes the matrices of layers")
    ] = "auto",
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="give each tensor-parallel rank whole experts")
    ] = False,
    enable_eplb: Annotated[bool, typer.Option(help="let experts move, to balance loads")] = False,
    num_redundant_experts: Annotated[
        int, typer.Option(help="further copies of each layer's experts")
    ] = 0,
    enable_return_routed_experts: Annotated[
        bool, typer.Option(help="keep the experts of tokens")
    ] = False,
    hf_overrides: Annotated[
        str, typer.Option(help="JSON: fields that replace those of config.json")
    ] = "",
    max_model_len: Annotated[
        int | None, typer.Option(help="default: the model's own limit; -1: the longest that fits")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="requests running at once")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="tokens in a step")] = 8192,
    block_size: Annotated[int, typer.Option(help="tokens in a KV block")] = 16,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto: the model's; fp8: half of bfloat16")
    ] = "auto",
    gpu_memory_utilization: Annotated[float, typer.Option(help="share of the memory")] = 0.9,
    kv_host_memory_bytes: Annotated[
        int, typer.Option(help="each rank's host memory for KV blocks; 0: none")
    ] = 0,
    kv_files: Annotated[bool, typer.Option("--kv-files", help="keep files of KV blocks")] = False,
    kv_tier_memory: Annotated[
        str, typer.Option(help="place of --kv-host-memory-bytes: host, device")
    ] = "host",
    max_loras: Annotated[int, typer.Option(help="LoRA adapters in a step")] = 0,
    max_lora_rank: Annotated[int, typer.Option(help="largest rank of an adapter")] = 16,
    speculative_method: Annotated[str, typer.Option(help="what drafts tokens")] = "none",
    num_speculative_tokens: Annotated[
        int, typer.Option(help="drafts of a request in a step at most")
    ] = 0,
    speculative_model: Annotated[
        str | None, typer.Option(help="draft_model: the draft model, named as --model is")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda:N, whose memory size to use")] = "cuda:0",
    memory_bytes: Annotated[
        int | None, typer.Option(help="memory of one device; default: that of --device")
    ] = None,
    model_root: Annotated[
        list[Path] | None,
        typer.Option(help="the daemons' model roots; default: the model's parent directory"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
    visible_devices: Annotated[
        str | None, typer.Option(envvar="CUDA_VISIBLE_DEVICES", hidden=True)
    ] = None,
) -> None:
    """Print the memory plan of a group of daemons; loads no weights."""
    configure_logs("info")
    with _exit_codes():
        _check_worker_extra()
    prepare_environment()
    # Importing torch takes seconds; `serve` does not wait for it either.
    from worker_daemon.plan.plan_report import plan_json, plan_text
    from worker_daemon.plan.planning import (
        find_model,
        plan_fitted_memory,
        plan_memory,
        read_partition,
    )

    with _exit_codes():
        found = find_model(model, own_environment())
        draft = None
        if speculative_model is not None:
            draft = find_model(speculative_model, own_environment(), field="speculative_model")
        is_fitted = max_model_len == FIT_MAX_MODEL_LEN
        config = WorkerConfig(
            parallel=ParallelConfig(
                pipeline_parallel_size=pipeline_parallel_size,
                tensor_parallel_size=tensor_parallel_size,
                layer_partition=None
                if layer_partition is None
                else read_partition(layer_partition),
            ),
            model=ModelConfig(
                model=str(found.directory),
                dtype=dtype,  # type: ignore[arg-type]  # plan_memory checks every value
                quantization=quantization,  # type: ignore[arg-type]  # as with dtype
                max_model_len=None if is_fitted else max_model_len,
                enable_expert_parallel=enable_expert_parallel,
                enable_eplb=enable_eplb,
                num_redundant_experts=num_redundant_experts,
                enable_return_routed_experts=enable_return_routed_experts,
                hf_overrides=hf_overrides,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            cache=CacheConfig(
                block_size=block_size,
                gpu_memory_utilization=gpu_memory_utilization,
                kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]  # as dtype above
                kv_host_memory_bytes=kv_host_memory_bytes,
                kv_files=kv_files,
                kv_tier_memory=kv_tier_memory,  # type: ignore[arg-type]  # as dtype above
            ),
            graph=GraphConfig(),
            lora=LoraConfig(max_loras=max_loras, max_lora_rank=max_lora_rank),
            speculative=SpeculativeConfig(
                method=speculative_method,  # type: ignore[arg-type]  # as dtype above
                num_speculative_tokens=num_speculative_tokens,
                model=None if draft is None else str(draft.directory),
            ),
        )
        total = memory_bytes
        if total is None:
            total = total_memory_bytes(load_nvml(), CudaDevice(device, visible_devices))
        make_plan = plan_fitted_memory if is_fitted else plan_memory
        roots = [each.root for each in (found, draft) if each is not None]
        made = make_plan(config, total, model_root or roots)
    sys.stdout.write(plan_json(made) + "\n" if as_json else plan_text(made))
