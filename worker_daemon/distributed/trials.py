"""The trial of what uses a link's windows. Kernels over windows are used only if they work here, on
every rank; else torch.distributed is."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from worker_daemon.contracts.window import Window
from worker_daemon.distributed.symmetric import Peers

_LOG = logging.getLogger(__name__)
NUM_TRIALS: Final = 3
"""Uses in a trial: more than there are slots in a window, so that some are used again."""
TRIAL_S: Final = 20.0
"""Time limit of a trial: a peer may have to compile the kernels."""

MadeT = TypeVar("MadeT")


def on_trial(
    peers: Peers,
    make: Callable[[Window], MadeT],
    works: Callable[[MadeT, Window], bool],
    purpose: str,
) -> MadeT | None:
    """Return what make(window) gives if it passes the trial works(); else stop the windows and
    return None, as without windows. Collective. purpose: for the log, what is done otherwise."""
    window = peers.window
    if window is None:
        return None
    try:
        made = make(window)
        if works(made, window):
            return made
    except Exception:  # after any failure, torch.distributed is used instead
        _LOG.warning("%s over peer memory", purpose, exc_info=True)
    peers.stop()  # this rank's kernels may wait forever for a peer
    return None
