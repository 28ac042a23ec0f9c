"""The text of a request, in parts that can be shown as its tokens come."""

from collections.abc import Sequence

from worker_client.inputs.tokenizer import Tokenizer
from worker_client.requests import RequestOutput


class StreamedText:
    """Turns the tokens of one request, or of one sample, into text. All parts together are the text
    that `worker-client generate` gives the request. No part has half a character, and none has text
    that a stop string may turn out to have begun in."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, includes_stop: bool = False
    ) -> None:
        """stop, includes_stop: the request's stop and include_stop_str_in_output."""
        self._stream = tokenizer.stream()
        self._stop = () if includes_stop else tuple(stop)
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self._num_taken = 0
        """Number of tokens."""
        self._num_shown = 0
        """Number of characters that were returned."""

    def take(self, token_ids: Sequence[int], output: RequestOutput | None = None) -> str:
        """Return the text that is certain after these tokens, any number of them. output: the
        request's, if they are its last: returns the rest of its text."""
        if output is None:
            text = self._pushed(token_ids)
            place = self._place_undecided(text)
            new, self._held = text[:place], text[place:]
        elif output.text is None:
            new = self._pushed(output.token_ids[self._num_taken :]) + self._stream.flush()
        else:
            new = output.text[self._num_shown :]
        self._num_shown += len(new)
        return new

    def _pushed(self, token_ids: Sequence[int]) -> str:
        self._num_taken += len(token_ids)
        return self._held + "".join(map(self._stream.push, token_ids))

    def _place_undecided(self, text: str) -> int:
        """Return the place from which on a text is the beginning of a stop string; its length if
        there is none. A whole stop string in it has not ended the request: it came too early."""
        first = len(text)
        for stop in self._stop:
            place = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while place >= 0 and not stop.startswith(text[place:]):
                place = text.find(stop[0], place + 1, first)
            if place >= 0:
                first = place
        return first


def final_text(tokenizer: Tokenizer, output: RequestOutput) -> str:
    """Return the text of a request that has ended: up to the stop string that ended it, if one
    did."""
    return tokenizer.decode(output.token_ids) if output.text is None else output.text
