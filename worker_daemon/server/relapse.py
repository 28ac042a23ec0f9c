"""Whether communicators that were made anew hang again: then making them anew once more does not
help, but new processes may. Knows links by their numbers; knows no thread, and ends nothing."""

from typing import Final

RELAPSE_S: Final = 60.0
"""A link that hangs so soon after the one before it is a relapse."""


class HangHistory:
    """Of one daemon. Used by the guard thread; any thread may call forgive()."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        """The link that hung last, and when."""

    def is_relapse(self, link: int, now: float) -> bool:
        """Take in that something that waits for other ranks hangs on `link` (now: seconds that only
        rise); tell whether another link did shortly before. Several waits of one link count as
        one."""
        last, self._last = self._last, (link, now)
        return last is not None and last[0] != link and now - last[1] < RELAPSE_S

    def forgive(self) -> None:
        """There is another explanation: a peer was lost, or a new driver begins."""
        self._last = None
