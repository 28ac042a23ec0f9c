"""Entry point of `worker-client`: the commands, signals, and errors as one line each."""

import signal
import sys
from types import FrameType

import typer

from client.cli.control import shutdown, status
from client.cli.run import bench, generate
from client.cli.trace import trace
from client.errors import ClientError
from rpc_schema.errors import WireError

app = typer.Typer(
    help="Drive worker daemons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, bench, status, trace, shutdown):
    app.command()(command)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """End as after Ctrl-C, so that what was started gets stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line."""
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        app()
    except (ClientError, WireError) as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
