"""Logs of a server: to stderr, as lines of text or JSON, or to systemd's journal. Prompts, tokens
and keys are never logged."""

import logging
import sys
from typing import Final

from worker_client.errors import config_error
from worker_host.log_lines import LOG_FORMATS, JournalHandler, JsonLines, TextLines

_FORMAT: Final = "serve: %(message)s"
_IDENTIFIER: Final = "worker-client-serve"


def configure_logs(log_format: str) -> None:
    """Send warnings, and all that the server tells its operator, out in a format of LOG_FORMATS.

    Raises:
        ClientConfigError: there is no such format, or it is journald and there is no journal.
    """
    root = logging.getLogger()
    root.handlers = [_handler(log_format)]
    root.setLevel(logging.WARNING)
    logging.getLogger(__package__).setLevel(logging.INFO)


def _handler(log_format: str) -> logging.Handler:
    if log_format not in LOG_FORMATS:
        fix = f"use one of {', '.join(LOG_FORMATS)}"
        raise config_error("log_format", log_format, "unknown format", fix)
    if log_format == "journald":
        try:
            return JournalHandler(_IDENTIFIER)
        except OSError as error:
            problem = f"the journal cannot be reached: {error.strerror}"
            fix = "use text or json where systemd does not run"
            raise config_error("log_format", log_format, problem, fix) from None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines(_FORMAT))
    return handler
