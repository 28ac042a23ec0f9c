"""Decides whether the device makes drafts: it rests where they do not pay."""

from typing import Final

RESTS_AFTER: Final = 16
"""Steps in a row for which none of its drafts are chosen, after which it makes none."""
MOST_SKIPPED: Final = 1024
"""Steps of which it is known that it has made no drafts after them."""


class DeviceRest:
    """The steps after which the device makes no drafts."""

    def __init__(self) -> None:
        self.asks = True
        """It is to make drafts after the next step."""
        self.num_skipped = 0
        """Steps after which it has made none."""
        self._num_idle = 0
        """Steps in a row without its drafts."""
        self._skipped: dict[int, None] = {}
        """Numbers of the last steps after which it has made none, the oldest first."""

    def plan(self, *, is_used: bool, must_ask: bool = False, must_rest: bool = False) -> None:
        """Decide about the next step. is_used: its drafts of the device pay; must_ask: the step
        after it needs some whatever they cost; must_rest: that step is to have none."""
        self._num_idle = 0 if is_used else self._num_idle + 1
        self.asks = not must_rest and (must_ask or self._num_idle < RESTS_AFTER)

    def sent(self, number: int) -> None:
        """Note that step `number` is sent as planned."""
        if self.asks:
            return
        self.num_skipped += 1
        self._skipped[number] = None
        if len(self._skipped) > MOST_SKIPPED:
            del self._skipped[next(iter(self._skipped))]

    def has_made(self, number: int) -> bool:
        """Return True if the device has made drafts after step `number`."""
        return number not in self._skipped
