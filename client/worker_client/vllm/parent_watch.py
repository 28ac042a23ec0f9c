"""Ends vLLM's engine process when the server's has died: it would otherwise work for nobody, and
keep the daemons' lease from the next server."""

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import Final

END_S: Final = 10.0
"""Time for an end in order, which gives the lease back. Daemons notice the end of the process
too."""


class ParentWatch:
    """Ends this process once the one that started it has ended. Does nothing in a process that
    multiprocessing did not start."""

    def __init__(self) -> None:
        self._has_ended = False
        parent = multiprocessing.parent_process()
        if parent is not None:
            name = "worker-daemon-parent-watch"
            threading.Thread(
                target=self._watch, args=(parent.sentinel,), name=name, daemon=True
            ).start()

    def check(self) -> None:
        """Raise SystemExit if the parent has ended. To be called before each step, on the engine's
        thread: vLLM would first finish the requests, whose clients are gone with the server."""
        if self._has_ended:
            raise SystemExit

    def _watch(self, sentinel: int) -> None:
        wait([sentinel])
        self._has_ended = True
        os.kill(os.getpid(), signal.SIGTERM)  # an engine without requests waits for one
        time.sleep(END_S)
        os._exit(1)
