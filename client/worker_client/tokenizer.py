"""Conversion between text and token ids, by the model's tokenizer.json. The only user of
`tokenizers`."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as _Tokenizer

from worker_client.errors import config_error, request_error

FILE_NAME = "tokenizer.json"
MAX_BYTES = 256 << 20
"""The largest known files have about 30 MB."""
REPLACEMENT: Final = "\ufffd"
"""Stands for bytes that are no character, or not yet."""
MAX_WINDOW: Final = 32
"""Bound on the tokens of a stream that are decoded again with the next one."""


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json.

        Raises:
            ClientConfigError: it cannot be read.
        """
        try:
            self._tokenizer = _Tokenizer.from_buffer(read_tokenizer_file(path))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            added = self._tokenizer.get_added_tokens_decoder()
        except Exception as error:  # tokenizers raises bare Exception
            problem = f"cannot read the tokenizer: {error}"
            fix = "repair the file, or remove it and use prompt_token_ids"
            raise config_error("model", str(path), problem, fix) from None
        self._special_ids = frozenset(number for number, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. add_special_tokens: with those that the tokenizer puts
        around a text; a chat template writes them itself.

        Raises:
            RequestError: the tokenizer rejects the text.
        """
        return self._ids(text, "prompt", add_special_tokens=add_special_tokens)

    def _ids(self, text: str, field: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        except Exception as error:  # tokenizers raises bare Exception, and TypeError for surrogates
            fix = "change the text, or give prompt_token_ids"
            raise request_error(field, text, f"the tokenizer rejects it: {error}", fix) from None
        return ids

    def encode_word(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens. Raises as encode does."""
        return self._ids(text, "bad_words", add_special_tokens=False)

    def stream(self) -> "TokenStream":
        """Return a stream of text at its start."""
        return TokenStream(self)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens: that of a stream of them."""
        text = self.decode_at_once(token_ids)
        if REPLACEMENT not in text:
            return text
        # The bytes of a character that turn out to be none may change the text before them.
        stream = self.stream()
        return "".join([*map(stream.push, token_ids), stream.flush()])

    def decode_at_once(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens, as `tokenizers` decodes them."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens, and for ids that the model has and the tokenizer
        lacks."""
        if token_id in self._special_ids:
            return False
        return self._tokenizer.id_to_token(token_id) is not None


class TokenStream:
    """Detokenizes a stream of tokens, without special tokens. Decodes each token behind those that
    gave the last text: a word may begin with a space only behind another one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """Tokens whose text was complete, then those whose text is not."""
        self._num_done = 0
        """Number of the former."""
        self._shown = 0
        """Number of characters of the window's text that were returned."""

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; empty while a character is incomplete."""
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode_at_once(self._window)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) < len(text) and len(self._window) > MAX_WINDOW:
            return self._shorten(text)
        new = whole[self._shown :]
        self._shown += len(new)
        if new and len(whole) == len(text):
            del self._window[: self._num_done]
            self._num_done = len(self._window)
            self._shown = len(self._tokenizer.decode_at_once(self._window))
        return new

    def flush(self) -> str:
        """Return the text of the tokens at the end, with an incomplete character replaced."""
        return self._tokenizer.decode_at_once(self._window)[self._shown :]

    def _shorten(self, text: str) -> str:
        """Return the text before a place in the window from which the rest is decoded by itself:
        what is there is no beginning of a character."""
        for place in range(len(self._window) - 1, self._num_done, -1):
            before = self._tokenizer.decode_at_once(self._window[:place])
            behind = self._tokenizer.decode_at_once(self._window[place:])
            if behind and before + behind == text and len(before) >= self._shown:
                new = before[self._shown :]
                del self._window[:place]
                self._num_done = self._shown = 0
                return new
        return ""


def load_tokenizer(model: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint directory; None if it has none."""
    path = model / FILE_NAME
    return Tokenizer(path) if path.exists() else None


def read_tokenizer_file(path: Path) -> bytes:
    """Read a regular file, without waiting for the other end of a FIFO. Raises OSError."""
    if not path.is_file():
        raise OSError("it is not a regular file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            raise OSError(f"it is not a regular file of at most {MAX_BYTES} bytes")
        return file.read(MAX_BYTES)
