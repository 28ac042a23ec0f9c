"""The process that compiles grammars and computes masks. Only here runs llguidance, whose work a
grammar can make as long as it likes: the driver may kill it, and the kernel does after a bound of
CPU time for each grammar and each mask. One thread, so that what it works on is what makes it slow.

A mask that allows one token only is not the driver's business: the matcher takes that token and
goes on to the next mask. So forced tokens are what the masks say, however a request gains them.
"""

import json
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from numpy.typing import NDArray

from worker_client.errors import ClientConfigError
from worker_client.inputs.child_process import ChildEnded, Messages, open_parent
from worker_client.inputs.tokenizer import FILE_NAME, read_tokenizer_file
from worker_client.structured.mask_messages import (
    IDLE,
    NO_TEXT,
    Answers,
    Begin,
    End,
    Forget,
    Fork,
    Header,
    Load,
    Masked,
    Operation,
    Ready,
    Setup,
    Take,
    memory_bytes,
    rows_of,
)
from worker_client.structured.text_tokens import TextTokens

MAX_ERROR_LENGTH: Final = 300
_STATE_DUMP: Final = re.compile(r"<(?:non-verbose/|state)>")
UNWRITABLE: Final = "the model has no tokens for a text that its grammar requires"
_NO_TOKEN: Final = "NoExtensionBias"
"""llguidance's error where a mask would allow nothing."""
_LARK_PART: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s]+>')
"""A text, comment, regular expression or token name of Lark."""
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_SURROGATES: Final = (0xD800, 0xDFFF)
_LAST_OF_ONE_BYTE: Final = 0x7F
_STRING_CHARACTER: Final = r'[^"\\\x00-\x1F\x7F]'
SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30)),
    f"{_STRING_CHARACTER}+",
)
"""Tokens that a mask takes as a whole where a grammar allows all of them: whitespace, and the text
of JSON strings. llguidance's own slices know two lengths of text, which leaves most masks within a
string of bounded length (maxLength) to be computed token by token."""
ANSWER_NS: Final = 2_000_000
"""CPU time after which the masks that are done are answered before others are computed."""
AHEAD_NS: Final = 5_000_000
"""CPU time of a batch in which matchers take forced tokens."""


class _Ended(Exception):
    """A matcher has no next mask."""


class Matchers:
    """The compiled grammars and the matchers of this process."""

    def __init__(self, setup: Setup) -> None:
        """Raises ClientConfigError if the model has no usable tokenizer."""
        self._setup = setup
        file = read_tokenizer_file(Path(setup.model) / FILE_NAME)
        self._texts = TextTokens(file, setup.vocab_size, setup.eos_token_ids)
        self._tokenizer = self._texts.tokenizer(SLICES, setup.eos_token_ids)
        self.num_words = -(-self._tokenizer.vocab_size // 32)
        self._limits = LLParserLimits(
            max_grammar_size=setup.max_grammar_size,
            max_lexer_states=setup.max_lexer_states,
            initial_lexer_fuel=setup.initial_lexer_fuel,
            step_lexer_fuel=setup.step_lexer_fuel,
            step_max_items=setup.step_max_items,
            verbose_errors=False,
        )
        size = memory_bytes(self.num_words)
        os.ftruncate(setup.memory_fd, size)
        memory = memoryview(mmap.mmap(setup.memory_fd, size))
        self._header = Header(memory)
        self._masks = rows_of(memory, self.num_words)
        self._address = self._masks.ctypes.data
        self._compiled: dict[int, LLMatcher | str] = {}
        """By key: a matcher in its first state, or why there is none."""
        self._matchers: dict[int, LLMatcher] = {}
        self._cost_ns: dict[int, int] = {}
        """CPU time of each matcher's last mask."""
        self._ahead_ns = 0
        """CPU time that is left in this batch to take forced tokens."""
        self.compile_ns = 0
        """CPU time that this batch has spent on compiling."""

    def answer(self, batch: Sequence[Operation], parent: Messages) -> None:
        """Do a batch, those masks first that took least the last time. Raises ChildEnded."""
        self._ahead_ns, self.compile_ns = AHEAD_NS, 0
        asked: list[Begin | Take | Fork] = []
        for each in batch:
            if isinstance(each, Take | Fork) or (isinstance(each, Begin) and each.is_asked):
                asked.append(each)
            else:
                self._do(each)
        asked.sort(key=lambda each: self._cost_ns.get(each.row, 0))
        done: list[Masked] = []
        answered_ns = time.process_time_ns()
        for each in asked:
            done.append(self._mask(each))
            now_ns = time.process_time_ns()
            if now_ns - answered_ns > ANSWER_NS:
                parent.send(_encode(Answers(done, is_last=False)))
                done, answered_ns = [], now_ns
        self._header.write(IDLE, 0)
        parent.send(_encode(Answers(done, is_last=True, compile_s=self.compile_ns / 1e9)))

    def _do(self, operation: Operation) -> None:
        if isinstance(operation, Load):
            self._compile(operation)
        elif isinstance(operation, Forget):
            self._compiled.pop(operation.key, None)
        elif isinstance(operation, Begin):
            self._start(operation.row + 1, self._setup.mask_s)
            self._begin(operation)
        elif isinstance(operation, End):
            self._matchers.pop(operation.row, None)
            self._cost_ns.pop(operation.row, None)

    def _start(self, subject: int, bound_s: float) -> int:
        """Begin a piece of work, after whose bound the kernel ends this process; return the CPU
        time so far."""
        now_ns = time.process_time_ns()
        self._header.write(subject, now_ns)
        signal.setitimer(signal.ITIMER_PROF, bound_s)
        return now_ns

    def _compile(self, load: Load) -> None:
        began_ns = self._start(-load.key, self._setup.compile_s)
        try:
            text = as_llguidance(load.kind, load.text, self._texts.names)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
            error = matcher.get_error() if matcher.is_error() else ""
        except MemoryError:
            raise
        except Exception as failure:  # llguidance's converter of EBNF raises bare Exceptions
            error = str(failure) or type(failure).__name__
        self._compiled[load.key] = shortened(error) if error else matcher
        self.compile_ns += time.process_time_ns() - began_ns

    def _begin(self, begin: Begin) -> str:
        """Make a matcher; return why there is none."""
        found = self._compiled.get(begin.key, "the grammar was not loaded")
        if isinstance(found, str):
            return found
        matcher = self._matchers[begin.row] = found.deep_copy()
        if not _consume(matcher, begin.tokens):
            return "its grammar does not allow the tokens that it has"
        return ""

    def _take(self, take: Take) -> str:
        """Let a matcher take tokens; return why it cannot."""
        matcher = self._matchers.get(take.row)
        if matcher is None:
            return "it could not be made again for its request"
        if _consume(matcher, take.tokens):
            return ""
        return f"its grammar does not allow the tokens {take.tokens}"

    def _fork(self, fork: Fork) -> str:
        """Copy a matcher, and let the copy take tokens; return why it cannot."""
        source = self._matchers.get(fork.source)
        if source is None:
            return "it could not be made again for its request"
        self._matchers[fork.row] = source.deep_copy()
        return self._take(Take(fork.row, fork.tokens))

    def _mask(self, asked: Begin | Take | Fork) -> Masked:
        began_ns = self._start(asked.row + 1, self._setup.mask_s)
        if isinstance(asked, Fork):
            error = self._fork(asked)
        else:
            error = self._begin(asked) if isinstance(asked, Begin) else self._take(asked)
        forced: list[int] = []
        if not error:
            try:
                self._fill(asked.row, forced)
            except _Ended as reason:
                error = str(reason)
        cost_ns = self._cost_ns[asked.row] = time.process_time_ns() - began_ns
        if isinstance(asked, Begin) and not asked.tokens:
            self.compile_ns += cost_ns
        return Masked(asked.row, forced, error)

    def _fill(self, row: int, forced: list[int]) -> None:
        """Write a mask, after as many forced tokens as there is time for; append these."""
        matcher, mask = self._matchers[row], self._masks[row]
        size = mask.nbytes
        address = self._address + row * size
        self._compute(matcher, address, size)
        began_ns = time.process_time_ns()
        until_ns, most = began_ns + self._ahead_ns, self._setup.max_jump
        while (token := self._only(mask)) is not None:
            if not matcher.validate_tokens([token]):
                raise _Ended(_failure(matcher) if matcher.is_error() else UNWRITABLE)
            if len(forced) >= most or time.process_time_ns() > until_ns:
                break
            matcher.consume_token(token)
            self._compute(matcher, address, size)
            forced.append(token)
        self._ahead_ns -= min(self._ahead_ns, time.process_time_ns() - began_ns)

    def _compute(self, matcher: LLMatcher, address: int, size: int) -> None:
        """Write a matcher's mask to an address."""
        self._texts.unwritable = ""
        matcher.unsafe_compute_mask_ptr(address, size)
        if self._texts.unwritable:
            raise _Ended(f"{UNWRITABLE}: {shortened(repr(self._texts.unwritable))}")
        if matcher.is_error():
            raise _Ended(_failure(matcher))

    def _only(self, mask: NDArray[np.int32]) -> int | None:
        """Return the token that a mask allows alone, if it is one of the model's and no end of
        sequence."""
        if np.count_nonzero(mask) != 1:
            return None
        word = int(mask.nonzero()[0][0])
        bits = int(mask[word]) & 0xFFFFFFFF
        if bits & (bits - 1):
            return None
        token = 32 * word + bits.bit_length() - 1
        is_end = token in self._setup.eos_token_ids
        return None if is_end or token >= self._setup.vocab_size else token


def _consume(matcher: LLMatcher, tokens: Sequence[int]) -> bool:
    # One by one: consume_tokens refuses an end of sequence behind the end.
    return all(matcher.consume_token(token) for token in tokens)


def _failure(matcher: LLMatcher) -> str:
    """Return why llguidance has given a matcher up."""
    reason = matcher.get_error()
    if reason.startswith(_NO_TOKEN):
        return NO_TEXT
    return f"its grammar is too complex: {shortened(reason)}"


def shortened(reason: str) -> str:
    """Return llguidance's reason on one line, without the state dump that may follow."""
    line = " ".join(_STATE_DUMP.split(reason)[0].split()) or "it is invalid"
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[: MAX_ERROR_LENGTH - 3]}..."


def as_llguidance(kind: str, text: str, names: Mapping[str, int]) -> str:
    """Return a grammar as llguidance reads it. names: tokens that a grammar may name, beside those
    that llguidance knows. Raises ValueError and others."""
    if kind == "json":
        schema = "{}" if text.strip() == "true" else text  # only an object takes defaults
        # Without whitespace, of which a weak model may never stop writing more.
        return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        texts = json.loads(text)
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise ValueError("it is not a JSON list of texts")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
    if not is_lark_syntax(text):
        return LLMatcher.grammar_from_lark(gbnf_to_lark(_ESCAPE.sub(_unescaped, text)))

    def by_id(found: re.Match[str]) -> str:
        part = found[0]
        return f"<[{names[part]}]>" if part in names else part

    return LLMatcher.grammar_from_lark(_LARK_PART.sub(by_id, text))


def _unescaped(found: re.Match[str]) -> str:
    """Return a character of GBNF that is escaped by its number: llguidance's converter drops the
    zeros of that."""
    number = int(found[1] or found[2] or "0", 16)
    if not number or _SURROGATES[0] <= number <= _SURROGATES[1] or number > sys.maxunicode:
        return found[0]
    return chr(number) if number > _LAST_OF_ONE_BYTE else f"\\x{number:02x}"


def _encode(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def main() -> None:
    """Answer the driver until it ends."""
    parent = open_parent(memory_bytes=int(sys.argv[1]))
    try:
        setup = msgspec.msgpack.decode(parent.receive() or b"", type=Setup)
        try:
            matchers = Matchers(setup)
        except (OSError, ValueError, ClientConfigError) as error:
            parent.send(_encode(Ready(0, str(error))))
            return
        parent.send(_encode(Ready(matchers.num_words, "")))
        batches = msgspec.msgpack.Decoder(list[Operation])
        while (message := parent.receive()) is not None:
            matchers.answer(batches.decode(message), parent)
    except ChildEnded:  # the driver has ended
        return


if __name__ == "__main__":
    main()
