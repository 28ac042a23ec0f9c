"""Conversion between text and token ids, by the model's tokenizer.json.

Where it is done: a text is encoded by tokenizer_process.py, in a process that is killed
when it exceeds its bounds. This holds for short texts too: a regular expression of the file may
take minutes for 4 KB, nothing ends a thread that matches it, and the pipe costs a tenth of a
millisecond. Tokens are decoded here, one at a time, by what of the file only decodes: no regular
expression, and a bounded text for each token.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
from tokenizers import Tokenizer as _Tokenizer

from rpc_schema.token_rules import MAX_BAD_WORD_TOKENS
from worker_client.errors import ClientConfigError, RequestError, config_error, request_error
from worker_client.inputs.job_pool import JobBounds, JobExceeded, JobFailed, JobPool
from worker_client.inputs.token_bytes import token_bytes
from worker_client.inputs.tokenizer_process import DESCRIBE, FAILED, Description, Encode

FILE_NAME = "tokenizer.json"
MAX_BYTES = 60 << 20
"""Bound on the file. The largest known ones have about 35 MB."""
LOAD_S: Final = 30.0
"""Processor seconds in which it must be read."""
MAX_TEXT_BYTES: Final = 4 << 20
"""Bound on the UTF-8 bytes of a text: as many as a million tokens of prose have."""
LARGEST_TEXT_BYTES: Final = 10 << 20
"""Bound on that setting: such a text, or its tokens, is one message to a process."""
SHORT_TEXT_BYTES: Final = 64 << 10
"""Texts up to this size have separate processes, and wait for no longer ones."""
BYTES_PER_LIMIT: Final = 256 << 10
"""Bytes for which a text has the time of TextBounds.encode_s, begun ones included. Published
tokenizers encode 1 to 3 MB a second."""
MAX_PROCESSES: Final = 2
"""Processes for short texts, and for others."""
MIN_WORD_BYTES: Final = 1024
"""Bound on a bad word, unless its tokens may be longer."""
NUM_SHOWN: Final = 80
"""Bound on the characters of a text in an error."""
REPLACEMENT: Final = "\ufffd"
"""Stands for bytes that are no character, or not yet."""
MAX_WINDOW: Final = 32
"""Bound on the tokens of a stream that are decoded again with the next one."""


class TextBounds(NamedTuple):
    """Bounds on the encoding of a text."""

    max_bytes: int = MAX_TEXT_BYTES
    """UTF-8 bytes."""
    encode_s: float = 1.0
    """Processor seconds for each BYTES_PER_LIMIT."""
    memory_bytes: int = 2 << 30
    """Memory of a process, beyond what it has at its start: for the tokenizer and a text."""

    def checked(self) -> "TextBounds":
        """Return it. Raises ClientConfigError."""
        check_text_bytes("max_bytes", self.max_bytes)
        return self

    def limit_s(self, num_bytes: int) -> float:
        """Return the processor seconds that a text of so many bytes may take."""
        return self.encode_s * (1 + num_bytes // BYTES_PER_LIMIT)


class Tokenizer:
    """A model's tokenizer. Threads may share it. Encoding blocks its thread without the GIL: in an
    asyncio program, call it on a thread."""

    def __init__(
        self,
        path: Path,
        bounds: TextBounds = TextBounds(),  # noqa: B008  # immutable
    ) -> None:
        """Read a tokenizer.json.

        Raises:
            ClientConfigError: it cannot be read, or takes too much.
        """
        self._bounds = bounds.checked()
        self._max_bytes = bounds.max_bytes
        try:
            file = read_tokenizer_file(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        limits = JobBounds(
            LOAD_S, max(LOAD_S, bounds.limit_s(bounds.max_bytes)), bounds.memory_bytes
        )
        module = "worker_client.inputs.tokenizer_process"
        self._short = JobPool(module, file, limits, max_processes=MAX_PROCESSES)
        self._long = JobPool(module, file, limits, max_processes=MAX_PROCESSES, keeps_spare=False)
        description = _described(self._short, path)
        self._longest_token_bytes = description.longest_token_bytes
        self._tokenizer = _Tokenizer.from_buffer(description.decoding)
        decoder = msgspec.json.decode(description.decoding).get("decoder")
        self._bytes_of: Callable[[str], bytes] | None = None
        with contextlib.suppress(ValueError):  # it does not work on bytes
            self._bytes_of = token_bytes(decoder)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(number for number, token in added.items() if token.special)

    def close(self) -> None:
        """End the processes, and every text that is encoded; only decode from here on. Not needed:
        they end with the last user of this object."""
        self._short.close()
        self._long.close()

    def fit_context(self, max_model_len: int) -> None:
        """Refuse texts that have more bytes than a context of so many tokens, all of them the
        longest. Short texts are never refused for that."""
        needed = max(SHORT_TEXT_BYTES, max_model_len * self._longest_token_bytes)
        self._max_bytes = min(self._bounds.max_bytes, needed)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. add_special_tokens: with those that the tokenizer puts
        around a text; a chat template writes them itself.

        Raises:
            RequestError: the text is too long, or takes too long, or the tokenizer rejects it.
        """
        return self._ids(text, "prompt", add_special_tokens=add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int | None]:
        """Return the token ids of two texts as one prompt, with special tokens, and the index of
        the first token of type 1, if the tokenizer has types. Raises as encode does."""
        start, *ids = self._ids(first, "prompt", second, add_special_tokens=True)
        return ids, None if start < 0 else start

    def encode_word(self, text: str) -> list[int]:
        """Return the token ids of a bad word, without special tokens. Raises as encode does."""
        most = max(MIN_WORD_BYTES, MAX_BAD_WORD_TOKENS * self._longest_token_bytes)
        if len(text) > most:
            fix = f"give words of at most {MAX_BAD_WORD_TOKENS} tokens"
            raise _refused(text, "bad_words", f"a word has more than {most} characters", fix)
        return self._ids(text, "bad_words", add_special_tokens=False)

    def _ids(
        self, text: str, field: str, second: str | None = None, *, add_special_tokens: bool
    ) -> list[int]:
        num_bytes = self._checked_size(text, field)
        if second is not None:
            num_bytes += self._checked_size(second, field)
        limit_s = self._bounds.limit_s(num_bytes)
        job = Encode(text, add_special_tokens, limit_s, second)
        pool = self._short if num_bytes <= SHORT_TEXT_BYTES else self._long
        try:
            answer = pool.run(msgspec.msgpack.encode(job), limit_s)
        except JobExceeded:
            problem = f"encoding it takes more than {limit_s:g} s"
            raise _refused(text, field, problem, "change or shorten the text") from None
        except JobFailed as error:
            raise _refused(text, field, f"it cannot be encoded: {error}", "shorten it") from None
        if answer[:1] == FAILED:
            raise _rejected(text, field, answer[1:].decode())
        ids: list[int] = np.frombuffer(answer, np.int32, offset=1).tolist()
        return ids

    def _checked_size(self, text: str, field: str) -> int:
        """Return the bytes of a text."""
        try:
            num_bytes = len(text) if len(text) > self._max_bytes else len(text.encode())
        except UnicodeEncodeError as error:
            raise _rejected(text, field, error) from None
        if num_bytes > self._max_bytes:
            problem = "the text is too long"
            fix = f"give at most {self._max_bytes} bytes of UTF-8"
            raise _refused(text, field, problem, fix)
        return num_bytes

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

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; of a special token, those of its name."""
        name = self.name_of(token_id) or ""
        if token_id in self._special_ids:
            return name.encode()
        if self._bytes_of is not None:
            return self._bytes_of(name)
        return self.decode_at_once([token_id]).encode()

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def special_id(self, name: str) -> int | None:
        """Return the id of a special token; None if there is none of this name."""
        token_id: int | None = self._tokenizer.token_to_id(name)
        return token_id if token_id in self._special_ids else None

    def has_text(self, token_id: int) -> bool:
        """Return False for special tokens, and for ids that the model has and the tokenizer
        lacks."""
        if token_id in self._special_ids:
            return False
        return self.name_of(token_id) is not None

    def name_of(self, token_id: int) -> str | None:
        """Return a token as the vocabulary has it; None for an id that the tokenizer lacks."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name


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
        is_full = len(self._window) > MAX_WINDOW
        if len(whole) < len(text) and is_full:
            return self._shorten(text)
        new = whole[self._shown :]
        self._shown += len(new)
        if (new or is_full) and len(whole) == len(text):  # full: of tokens without a text
            del self._window[: self._num_done]
            self._num_done = len(self._window)
            self._shown = len(self._tokenizer.decode_at_once(self._window))
        return new

    def flush(self) -> str:
        """Return the text of the tokens at the end, with an incomplete character replaced."""
        return self._tokenizer.decode_at_once(self._window)[self._shown :]

    def _shorten(self, text: str) -> str:
        """Return the text before a place in the window from which the rest is decoded by itself:
        what is there is no beginning of a character. If there is no such place, all of it."""
        for place in range(len(self._window) - 1, self._num_done, -1):
            before = self._tokenizer.decode_at_once(self._window[:place])
            behind = self._tokenizer.decode_at_once(self._window[place:])
            if behind and before + behind == text and len(before) >= self._shown:
                return self._cut(before, place)
        return self._cut(text, len(self._window))

    def _cut(self, text: str, place: int) -> str:
        new = text[self._shown :]
        del self._window[:place]
        self._num_done = self._shown = 0
        return new


def check_text_bytes(field: str, value: int) -> None:
    """Raise ClientConfigError unless texts may have so many bytes."""
    if not 0 < value <= LARGEST_TEXT_BYTES:
        fix = f"use 1 to {LARGEST_TEXT_BYTES}"
        raise config_error(field, value, "it is out of bounds", fix)


def load_tokenizer(
    model: Path,
    bounds: TextBounds = TextBounds(),  # noqa: B008  # immutable
) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint directory; None if it has none. Raises
    ClientConfigError."""
    path = model / FILE_NAME
    return Tokenizer(path, bounds) if path.exists() else None


def _described(pool: JobPool, path: Path) -> Description:
    """Start a process; return what it says of the file."""
    try:
        answer = pool.open()
        if answer[:1] != FAILED:
            answer = pool.run(DESCRIBE)
    except JobExceeded:
        raise _unreadable(path, f"it takes more than {LOAD_S:g} s") from None
    except JobFailed as error:
        raise _unreadable(path, error) from None
    if answer[:1] == FAILED:
        raise _unreadable(path, answer[1:].decode())
    return msgspec.msgpack.decode(answer[1:], type=Description)


def _unreadable(path: Path, why: object) -> ClientConfigError:
    fix = "repair the file, or remove it and use prompt_token_ids"
    return config_error("model", str(path), f"cannot read the tokenizer: {why}", fix)


def _rejected(text: str, field: str, why: object) -> RequestError:
    fix = "change the text, or give prompt_token_ids"
    return _refused(text, field, f"the tokenizer rejects it: {why}", fix)


def _refused(text: str, field: str, problem: str, fix: str) -> RequestError:
    return request_error(field, text[:NUM_SHOWN], problem, fix)


def read_tokenizer_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a regular file, without waiting for the other end of a FIFO. Raises OSError."""
    if not path.is_file():
        raise OSError("it is not a regular file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > max_bytes:
            raise OSError(f"it is not a regular file of at most {max_bytes} bytes")
        return file.read(max_bytes)
