"""Stop strings: found in a request's text as its tokens arrive."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # it needs the library of an extra
    from worker_client.inputs.tokenizer import TokenStream

MAX_STOP_STRINGS: Final = 16
MAX_STOP_BYTES: Final = 512
"""Bound on the UTF-8 bytes of all stop strings of a request, which are stored in its note."""


class StopWatch:
    """Looks for stop strings in the text of one request."""

    def __init__(
        self, stops: Sequence[str], stream: "TokenStream", *, min_tokens: int, includes_stop: bool
    ) -> None:
        """min_tokens: stop strings that end within this many tokens are ignored. includes_stop: the
        text ends after the stop string, not before it."""
        self._stops = tuple(stops)
        self._stream = stream
        self._num_banned = min_tokens
        self._includes_stop = includes_stop
        self._num_kept = max(map(len, self._stops)) - 1
        self._parts: list[str] = []
        """The text so far. It is joined once: a text of each token would cost its square."""
        self._end = ""
        """Its end, in which a stop string may have begun."""
        self.stopped_text: str | None = None
        """The text up to the stop string, once there is one."""

    def take(self, token_id: int) -> bool:
        """Append a token; return True if the text now has a stop string."""
        new = self._stream.push(token_id)
        before, text = len(self._end), self._end + new
        self._parts.append(new)
        self._end = text[max(0, len(text) - self._num_kept) :]
        if self._num_banned > 0:
            self._num_banned -= 1
            return False
        # One that was there before has ended the request, or came before min_tokens.
        places = (_first_end_behind(text, stop, before) for stop in self._stops)
        found = [place for place in places if place is not None]
        if not found:
            return False
        start, end = min(found)
        num_behind = len(text) - (end if self._includes_stop else start)
        whole = "".join(self._parts)
        self.stopped_text = whole[: len(whole) - num_behind]
        return True


def _first_end_behind(text: str, stop: str, before: int) -> tuple[int, int] | None:
    """Return start and end of the first occurrence that ends after `before`."""
    start = text.find(stop)
    while start >= 0 and start + len(stop) <= before:
        start = text.find(stop, start + 1)
    return None if start < 0 else (start, start + len(stop))
