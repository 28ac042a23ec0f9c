"""How many files and connections the process may have open. Each peer takes some, and where none is
left libzmq refuses new peers on tcp and ends the process on ipc: so the limit is to be high."""

import logging
import resource
from typing import Final

LOW: Final = 1024
"""A hard limit of no more than this deserves a word in the log."""

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard <= LOW and hard != resource.RLIM_INFINITY:
        logger.warning(
            "no more than %d files and connections may be open: raise the hard limit (LimitNOFILE)",
            hard,
        )
    return hard
