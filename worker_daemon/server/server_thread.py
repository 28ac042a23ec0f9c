"""The base of the daemon's threads, which the main thread starts and joins."""

import threading
from collections.abc import Callable


class ServerThread(threading.Thread):
    """A daemon thread that is joined with a time limit."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(target=work, name=name, daemon=True)

    def join_within(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; return True if it ended in time, or never started."""
        if self.ident is not None:
            self.join(timeout_s)
        return not self.is_alive()
