"""Entry point of `worker-client`: the commands, signals, and errors as one line each."""

import signal
import sys
from types import FrameType
from typing import Final

import typer

from client.cli.control import drain, shutdown, status
from client.cli.run import bench, generate
from client.cli.top import top
from client.cli.trace import trace
from client.errors import AuthenticationError, ClientError, DrainingError, ForbiddenError
from rpc_schema.errors import WireError
from rpc_schema.exit_codes import ExitCode

_NOT_ALLOWED: Final = (AuthenticationError, ForbiddenError)

app = typer.Typer(
    help="Drive worker daemons.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (generate, bench, status, top, trace, drain, shutdown):
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
        sys.exit(_exit_code(error))


def _exit_code(error: Exception) -> int:
    if isinstance(error, _NOT_ALLOWED):
        return ExitCode.KEY_REFUSED
    return ExitCode.RETRY_LATER if isinstance(error, DrainingError) else 2


if __name__ == "__main__":
    main()
