"""Ends vLLM's engine process when the server's has died: it would otherwise idle for ever, and keep
the daemons' lease from the next server."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import Final

END_S: Final = 10.0
"""Time for an end in order, which gives the lease back."""


def end_with_parent() -> None:
    """From now on, end this process by SIGTERM once the process that started it has ended. Does
    nothing in a process that multiprocessing did not start."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        name = "worker-daemon-parent-watch"
        threading.Thread(target=_watch, args=(parent.sentinel,), name=name, daemon=True).start()


def _watch(sentinel: int) -> None:
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)
