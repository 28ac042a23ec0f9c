"""Entry point of `worker-client`: the commands, signals, and errors as one line each."""

import signal
from types import FrameType
from typing import Annotated

import typer

from rpc_schema.errors import WorkerDaemonError
from rpc_schema.version import version_line
from worker_client.cli.bench_compare import bench_compare
from worker_client.cli.command_errors import exit_with
from worker_client.cli.config import config
from worker_client.cli.control import drain, shutdown, status
from worker_client.cli.demo import demo
from worker_client.cli.embed import embed
from worker_client.cli.lora import lora
from worker_client.cli.output_file import print_text
from worker_client.cli.run import bench, generate
from worker_client.cli.serve import serve
from worker_client.cli.top import top
from worker_client.cli.trace import trace
from worker_client.cli.up_vllm import up_vllm

# Without rich, help and errors are plain text: option names are not truncated and errors not
# wrapped.
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command, summary in (
    (generate, "Generate for prompts or for a file of requests."),
    (bench, "Generate, and measure it."),
    (bench_compare, "Compare the JSON files of two runs of bench."),
    (embed, "Embed or classify prompts, or the requests of a file."),
    (serve, "Serve OpenAI's API over HTTP."),
    (demo, "Kill a driver and a daemon, and compare the tokens."),
    (status, "Show what each daemon is and does."),
    (top, "Watch the daemons' activity, refreshed every second."),
    (trace, "Trace a running group, for Perfetto."),
    (up_vllm, "Start daemons, and vLLM's server as their driver."),
    (drain, "Make daemons refuse new steps and new drivers."),
    (shutdown, "End daemons; a running step is finished first."),
):
    app.command(short_help=summary)(command)
app.add_typer(config, name="config", short_help="Show settings and their origins.")
app.add_typer(lora, name="lora", short_help="Add, remove, list or pin LoRA adapters.")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print_text(version_line("worker-client"))
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show versions and end."
        ),
    ] = False,
) -> None:
    """Drive worker daemons."""


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """Exit as after Ctrl-C, so that started processes are stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        app()
    except WorkerDaemonError as error:
        exit_with(error)


if __name__ == "__main__":
    main()
