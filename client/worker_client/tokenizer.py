"""Conversion between text and token ids, by the model's tokenizer.json. The only user of
`tokenizers`."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer
from tokenizers.decoders import DecodeStream

from worker_client.errors import config_error, request_error

FILE_NAME = "tokenizer.json"
MAX_BYTES = 256 << 20
"""The largest known files have about 30 MB."""


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
        except Exception as error:  # tokenizers raises bare Exception
            problem = f"cannot read the tokenizer: {error}"
            fix = "repair the file, or remove it and use prompt_token_ids"
            raise config_error("model", str(path), problem, fix) from None

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with the special tokens that its template adds.

        Raises:
            RequestError: the tokenizer rejects the text.
        """
        return self._ids(text, "prompt", add_special_tokens=True)

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
        return TokenStream(self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


class TokenStream:
    """Detokenizes a stream of tokens, without special tokens."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; empty while a character is incomplete."""
        try:
            return self._decoder.step(self._tokenizer, token_id) or ""
        except Exception:  # tokenizers raises bare Exception for bytes that are no text
            self._decoder = DecodeStream(skip_special_tokens=True)
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
