"""The text of a single token, for log probabilities."""

from functools import lru_cache
from typing import Final

from worker_client.inputs.tokenizer import Tokenizer

_MAX_CACHED: Final = 1 << 16


class TokenTexts:
    """Texts of tokens of one tokenizer. Belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_MAX_CACHED)(self._text)
        """Function from a token id to the text that the token adds behind others. Bytes that are no
        whole character become U+FFFD. A special token has its name, and an id that the tokenizer
        lacks "token_id:ID"."""

    def num_shown(self, token_id: int) -> int:
        """Return the number of characters that a token adds to a text."""
        return len(self.text(token_id)) if self._tokenizer.has_text(token_id) else 0

    def _text(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id):
            return self._tokenizer.name_of(token_id) or f"token_id:{token_id}"
        once = self._tokenizer.decode_at_once([token_id])
        # A word at the beginning of a text may lose the space before it.
        twice = self._tokenizer.decode_at_once([token_id, token_id])
        return twice[len(once) :] if twice.startswith(once) else once
