"""The process that reads a tokenizer.json and encodes texts, for tokenizer.py. The file
is the checkpoint's: its regular expressions may take any time, and panic."""

import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from tokenizers import Tokenizer

from worker_client.inputs.job_pool import limit_processor_time, serve_jobs

DESCRIBE: Final = b""
"""The job that asks for a Description."""
DONE: Final = b"="
"""First byte of the answer to a job that was done: token ids as int32, or a Description."""
FAILED: Final = b"!"
"""First byte of an error's text: the file is unusable, or the tokenizer rejects a text."""
MAX_SAID: Final = 500
"""Bound on the characters of an error of `tokenizers`."""
MAX_TOKEN_BYTES: Final = 64 << 10
"""Bound on the text of a token. The longest of published models has about 500 bytes."""


class Encode(msgspec.Struct, frozen=True):
    """A job."""

    text: str
    add_special_tokens: bool
    limit_s: float
    """Processor seconds that it may take."""
    second: str | None = None
    """Text of a pair; the answer then has the number of its first token before the ids, which is -1
    if it has no token types of its own."""


class Description(msgspec.Struct, frozen=True):
    """The part of the file that decodes tokens."""

    decoding: bytes
    """The tokenizer.json without all that only encodes: no regular expression is left."""
    longest_token_bytes: int


class _Encoding:
    """The tokenizer."""

    _tokenizer: Tokenizer

    def __init__(self) -> None:
        self._file = b""

    def set_up(self, message: bytes) -> bytes:
        """Read the file."""
        try:
            self._tokenizer = Tokenizer.from_buffer(message)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        except BaseException as error:  # tokenizers raises bare Exception, and panics
            return _failed(error)
        self._file = message
        return DONE

    def answer(self, message: bytes) -> bytes:
        """Do a job."""
        if message == DESCRIBE:
            return self._describe()
        job = msgspec.msgpack.decode(message, type=Encode)
        limit_processor_time(job.limit_s)
        try:  # without offsets, in a third of the time of encode
            (encoded,) = self._tokenizer.encode_batch_fast(
                [job.text if job.second is None else (job.text, job.second)],
                add_special_tokens=job.add_special_tokens,
            )
        except BaseException as error:  # likewise
            return _failed(error)
        ids = encoded.ids
        if job.second is not None:
            ids = [next((at for at, kind in enumerate(encoded.type_ids) if kind), -1), *ids]
        return DONE + np.array(ids, np.int32).tobytes()

    def _describe(self) -> bytes:
        fields = msgspec.json.decode(self._file)
        try:
            longest = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=0)
            _check_decoder(fields.get("decoder"), longest)
        except ValueError as error:
            return _failed(error)
        for part in ("normalizer", "pre_tokenizer", "post_processor", "truncation", "padding"):
            fields[part] = None
        if fields["model"].get("merges"):
            fields["model"]["merges"] = []
        return DONE + msgspec.msgpack.encode(Description(msgspec.json.encode(fields), longest))


def _check_decoder(decoder: object, longest_token_bytes: int) -> None:
    """Raise ValueError for a decoder that may take any time, or make any text of a token."""
    growth = _growth(decoder)
    if longest_token_bytes * growth > MAX_TOKEN_BYTES:
        raise ValueError(f"a token may have more than {MAX_TOKEN_BYTES} bytes of text")


def _growth(decoder: object) -> int:
    """Return how many times longer a decoder makes a text, at most."""
    if isinstance(decoder, Sequence) and not isinstance(decoder, str):
        product = 1
        for each in decoder:
            product = min(MAX_TOKEN_BYTES + 1, product * _growth(each))
        return product
    if not isinstance(decoder, Mapping):
        return 1
    if "decoders" in decoder:
        return _growth(decoder["decoders"])
    pattern = decoder.get("pattern")
    if pattern is None:
        return 1
    if not isinstance(pattern, Mapping) or "String" not in pattern:
        raise ValueError("its decoder has a regular expression, which may take any time")
    found, content = str(pattern["String"]), str(decoder.get("content", ""))
    if not found:
        return 1 + len(content.encode())
    return max(1, -(-len(content.encode()) // len(found.encode())))


def _failed(error: BaseException) -> bytes:
    said = str(error)[:MAX_SAID] or type(error).__name__
    return FAILED + said.encode("utf-8", "backslashreplace")


def main() -> None:
    """Serve a JobPool."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads take address space
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic prints its stack
    encoding = _Encoding()
    serve_jobs(encoding.set_up, encoding.answer)


if __name__ == "__main__":
    main()
