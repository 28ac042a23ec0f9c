"""Ends a command with an error: one line, and its exit code."""

import sys
from typing import Final, NoReturn

from rpc_schema.errors import DrainingError, ForbiddenError, WorkerDaemonError
from worker_client.errors import AuthenticationError, OutputError
from worker_host.exit_codes import ExitCode

_NOT_ALLOWED: Final = (AuthenticationError, ForbiddenError)
FAILED: Final = 2
"""Exit code of a command that an error has ended, unless the error has another one."""


def exit_with(error: WorkerDaemonError) -> NoReturn:
    """Write the error to standard error, and exit."""
    sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
    sys.exit(_exit_code(error))


def _exit_code(error: Exception) -> int:
    if isinstance(error, _NOT_ALLOWED):
        return ExitCode.KEY_REFUSED
    if isinstance(error, OutputError):
        return ExitCode.OUTPUT
    return ExitCode.RETRY_LATER if isinstance(error, DrainingError) else FAILED
