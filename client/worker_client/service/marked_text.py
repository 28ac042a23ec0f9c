"""Text of a request with the special tokens that mark calls, which texts do not have otherwise."""

from collections.abc import Mapping, Sequence

from worker_client.inputs.text_stream import StreamedText
from worker_client.requests import RequestOutput


class MarkedText:
    """Puts marks into a StreamedText, at their places among the tokens. Text that is held back as
    the beginning of a stop string comes behind them."""

    def __init__(self, text: StreamedText, marks: Mapping[int, str]) -> None:
        """marks: texts of special tokens, by their ids."""
        self._text = text
        self._marks = marks

    def take(self, token_ids: Sequence[int], output: RequestOutput | None = None) -> str:
        """Return what StreamedText.take returns, with marks."""
        parts, first = [], 0
        for place, token_id in enumerate(token_ids):
            if token_id in self._marks:
                parts += [self._text.take(token_ids[first : place + 1]), self._marks[token_id]]
                first = place + 1
        return "".join([*parts, self._text.take(token_ids[first:], output)])
