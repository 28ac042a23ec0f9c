"""The command line `worker-daemon`: options to settings, errors to exit codes. Knows nothing of
what the options mean."""

import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from worker_daemon.errors import ConfigError
from worker_daemon.logs import configure_logs
from worker_daemon.server.assembly import run_daemon
from worker_daemon.server.endpoints import EndpointInUseError
from worker_daemon.settings import load_settings, prepare_kernel_cache

EXIT_IN_USE: Final = 73
EXIT_CONFIG: Final = 78

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def main_options() -> None:
    """A GPU worker for LLM inference that runs as a daemon."""


@app.command()
def serve(
    endpoint: Annotated[str | None, typer.Option(help="ipc:///DIR/NAME")] = None,
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
        typer.Option(help="models must lie under one of these; default: the working directory"),
    ] = None,
    save_root: Annotated[
        str | None,
        typer.Option(help="weights are saved under it, by name; without it they are not"),
    ] = None,
    profile_dir: Annotated[
        str | None,
        typer.Option(help="traces go there; default: profiles/ in the state directory or cache"),
    ] = None,
    exit_with_parent_fd: Annotated[
        int | None, typer.Option(help="end when this descriptor reads end-of-file")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error")] = None,
) -> None:
    """Serve one device until told to stop.

    Each option may also come from the environment (WORKER_DAEMON_ENDPOINT, ...) or from the file,
    in this order of precedence.
    """
    configure_logs("info")
    try:
        settings = load_settings(
            {
                "endpoint": endpoint,
                "device": device,
                "state-dir": state_dir,
                "model-root": model_root,
                "save-root": save_root,
                "profile-dir": profile_dir,
                "exit-with-parent-fd": exit_with_parent_fd,
                "log-level": log_level,
            },
            config,
        )
        configure_logs(settings.log_level)
        prepare_kernel_cache(settings)
        exit_code = run_daemon(settings)
    except EndpointInUseError as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(EXIT_IN_USE) from None
    except ConfigError as error:
        logging.getLogger(__name__).error("%s", error)
        raise typer.Exit(EXIT_CONFIG) from None
    raise typer.Exit(exit_code)
