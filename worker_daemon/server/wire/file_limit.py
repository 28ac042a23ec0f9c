"""How many files and connections the process may have open. Each peer takes some, and where none is
left libzmq refuses new peers on tcp and ends the process on ipc: so the limit is to be high."""

import logging
import resource
from typing import Final

from worker_daemon.errors import ConfigError

LEAST: Final = 64
"""Files that an idle daemon and one driver need, and some to spare."""
LOW: Final = 1024
"""A hard limit of no more than this deserves a word in the log."""

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one; return it.

    Raises:
        ConfigError: it is too low for a daemon.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST and hard != resource.RLIM_INFINITY:
        raise ConfigError(
            "too few files and connections may be open",
            field="RLIMIT_NOFILE",
            value=hard,
            fix=f"raise the hard limit (LimitNOFILE, ulimit -Hn) to {LEAST} at least, better 65536",
        )
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard <= LOW and hard != resource.RLIM_INFINITY:
        logger.warning(
            "no more than %d files and connections may be open: raise the hard limit (LimitNOFILE)",
            hard,
        )
    return hard
