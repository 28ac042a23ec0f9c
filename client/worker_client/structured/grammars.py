"""Grammars of one model, compiled by llguidance, which only this module uses. A grammar is compiled
on one of a few threads, within limits of time and size.

Copies of a compiled grammar share a lock: threads compute their masks one after the other. So a
grammar that several requests use is compiled several times, they use copies of each, and a thread
computes the masks of copies of one compilation.

llguidance itself bounds the work of a grammar: the size of its rules, the states of its lexer, and
the work for one mask. A grammar that exceeds a bound fails when it is compiled or used.
"""

import itertools
import json
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from weakref import WeakSet

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray

from rpc_schema.structured import StructuredOutput
from worker_client.errors import ClientConfigError, RequestError
from worker_client.structured.masked_steps import is_ready
from worker_client.structured.options import FIELD
from worker_client.tokenizer import FILE_NAME, read_tokenizer_file

MAX_ERROR_LENGTH: Final = 300
_STATE_DUMP: Final = re.compile(r"<(?:non-verbose/|state)>")
_STRING_CHARACTER: Final = r'[^"\\\x00-\x1F\x7F]'
SLICES: Final = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_STRING_CHARACTER}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 30)),
    f"{_STRING_CHARACTER}+",
)
"""Tokens that a mask takes as a whole where a grammar allows all of them: whitespace, and the text
of JSON strings. llguidance's own slices know two lengths of text, which leaves most masks within a
string of bounded length (maxLength) to be computed token by token."""
ROWS_PER_THREAD: Final = 4
"""Masks in a step for each thread that is woken: most take 5 us, few 1 ms and more."""
REQUESTS_PER_COMPILATION: Final = 4
"""Requests that share one compilation before another is made. Not fewer, because a new compilation
is slow in its first steps: it computes lexer states when it first meets them."""
MAX_AGAIN_S: Final = 0.1
"""A grammar that took longer to compile is not compiled again: others wait for the threads."""


def _num_mask_threads() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0)) * 3 // 4))


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on compiling and using a grammar."""

    num_threads: int = 4
    """Threads that compile, and so grammars that are compiled at a time."""
    compile_s: float = 10.0
    """Seconds in which a grammar must be compiled, including the wait for a thread."""
    max_cached: int = 256
    """Compiled grammars that are kept for later requests."""
    num_mask_threads: int = field(default_factory=_num_mask_threads)
    """Threads that compute masks. By default 3/4 of the processors, 16 at most."""
    max_compilations: int | None = None
    """Compilations of one grammar, for requests that use it at the same time; None: one for each
    thread that computes masks."""
    max_grammar_size: int = 200_000
    """Bound on the symbols in all rules of a grammar."""
    max_lexer_states: int = 50_000
    """Bound on the states of a lexer, which take up to 2 KB each."""
    initial_lexer_fuel: int = 1_000_000
    """Bound on the work to compile a grammar's regular expressions; about 20 ms."""
    step_lexer_fuel: int = 200_000
    """Bound on the lexer's work for one mask; about 15 ms."""
    step_max_items: int = 50_000
    """Bound on the parser's work for one mask; about 3 ms."""
    max_jump: int = 1024
    """Tokens that a request may gain at once without sampling them; 0: none."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class GrammarMatcher:
    """One request's copy of a compilation: it wraps a matcher of llguidance."""

    matcher: LLMatcher
    compilation: int
    """Number of the compilation, among those of all grammars."""

    def consume_tokens(self, tokens: list[int]) -> bool:
        """Take tokens. Return False if the grammar does not allow them: the matcher has failed."""
        return self.matcher.consume_tokens(tokens)

    def is_error(self) -> bool:
        """Return True if the matcher has failed. It stays failed."""
        return self.matcher.is_error()

    def get_error(self) -> str:
        """Return why the matcher failed."""
        return self.matcher.get_error()


@dataclass(frozen=True, slots=True)
class _Compilation:
    """A grammar's matcher in its first state, to be copied."""

    number: int
    """Its number, among the compilations of all grammars."""
    matcher: "Future[LLMatcher]"
    copies: "WeakSet[GrammarMatcher]" = field(default_factory=WeakSet)
    """Its copies that are in use."""

    def copy(self, timeout_s: float) -> GrammarMatcher:
        """Return a copy; wait for the compilation."""
        matcher = GrammarMatcher(self.matcher.result(timeout_s).deep_copy(), self.number)
        self.copies.add(matcher)
        return matcher


@dataclass(slots=True, eq=False)
class _Compiled:
    """A grammar and its compilations."""

    compilations: list[_Compilation] = field(default_factory=list)
    """At least one, the oldest first."""
    is_quick: bool = False
    """It was compiled within MAX_AGAIN_S."""
    waiting: "list[Future[None]] | None" = field(default_factory=list)
    """Futures of requests that wait for the first compilation; None once it is done or failed."""

    @property
    def first(self) -> "Future[LLMatcher]":
        """The matcher of the first compilation."""
        return self.compilations[0].matcher

    @property
    def num_copies(self) -> int:
        """Copies in use."""
        return sum(len(each.copies) for each in self.compilations)

    def copy(self, timeout_s: float) -> GrammarMatcher:
        """Return a copy of the compilation that the fewest use, of those that are done; wait for
        the first one. Of equals it is the oldest: its lexer knows most states."""
        first, *others = self.compilations
        done = [first, *(each for each in others if is_ready(each.matcher))]
        return min(done, key=lambda each: len(each.copies)).copy(timeout_s)


class Grammars:
    """Owns the tokenizer, the compiled grammars and the threads. Any thread may call compile; only
    the driver's thread may call the other methods."""

    def __init__(
        self,
        model: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        """model: a directory with a tokenizer.json; vocab_size and eos_token_ids: the loaded
        model's.

        Raises:
            ClientConfigError: there is no usable tokenizer, or the model has no end-of-sequence
                token.
        """
        self.limits = GrammarLimits() if limits is None else limits
        ends = [token for token in eos_token_ids if token < vocab_size]
        if not ends:
            raise _unusable(model, "the model names no end-of-sequence token")
        self._tokenizer = _load(model, vocab_size, ends)
        self._vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        """int32 words of a mask."""
        self._num_own_words = -(-self._tokenizer.vocab_size // 32)
        self._parser_limits = LLParserLimits(
            max_grammar_size=self.limits.max_grammar_size,
            max_lexer_states=self.limits.max_lexer_states,
            initial_lexer_fuel=self.limits.initial_lexer_fuel,
            step_lexer_fuel=self.limits.step_lexer_fuel,
            step_max_items=self.limits.step_max_items,
            verbose_errors=False,
        )
        self._compiler = ThreadPoolExecutor(self.limits.num_threads, "grammars")
        self._threads: dict[int, LLExecutor] = {}
        """Threads that compute masks, by their number: a step wakes no more than it needs."""
        self._numbers = itertools.count()
        self._buffer = np.zeros((0, self._num_own_words), np.int32)
        self._lock = threading.Lock()
        self._is_closed = False
        self._compiling: dict[StructuredOutput, _Compiled] = {}
        """Grammars whose first compilation is not done."""
        self._compiled: OrderedDict[StructuredOutput, _Compiled] = OrderedDict()
        """The others, the least recently used first."""

    @property
    def compile_s(self) -> float:
        """Seconds in which a grammar must be compiled."""
        return self.limits.compile_s

    def close(self) -> None:
        """Accept no more compilations, and cancel the futures of requests that wait for a grammar.
        A compilation that is running goes on, and mask threads end with this object."""
        with self._lock:
            self._is_closed = True
            for compiled in self._compiling.values():
                for each in compiled.waiting or ():
                    each.cancel()
        self._compiler.shutdown(wait=False, cancel_futures=True)

    def compile(self, grammar: StructuredOutput) -> "Future[Any]":
        """Compile a request's grammar, unless it is compiled. The future is done when the request
        can begin; it raises RequestError for a grammar that does not compile or exceeds the
        limits."""
        with self._lock:
            compiled = self._find(grammar)
            if compiled.waiting is None:
                return compiled.first
            compiled.waiting.append(Future())
            return compiled.waiting[-1]

    def begin(self, grammar: StructuredOutput) -> GrammarMatcher:
        """Return a new matcher of a grammar; if it is not compiled yet, wait at most compile_s.

        Raises:
            RequestError: the grammar does not compile or exceeds the limits.
            TimeoutError: it was not compiled in time.
        """
        with self._lock:
            compiled = self._find(grammar)
            if compiled.waiting is not None:
                compiled.waiting.append(Future())  # this caller has not given up
        matcher = compiled.copy(self.compile_s)
        with self._lock:
            self._compile_again(grammar, compiled, compiled.num_copies)
        return matcher

    def _find(self, grammar: StructuredOutput) -> _Compiled:
        if (found := self._compiled.get(grammar)) is not None:
            self._compiled.move_to_end(grammar)
            return found
        if (found := self._compiling.get(grammar)) is not None:
            return found
        found = _Compiled()
        self._submit(found, self._compile_first, grammar, found)
        self._compiling[grammar] = found
        return found

    def fill(self, matchers: Sequence[GrammarMatcher]) -> NDArray[np.int32]:
        """Return the tokens that each matcher allows next, int32 [matchers, num_words]. Valid until
        the next call. A matcher that fails reports it from then on (`is_error`)."""
        if len(matchers) > len(self._buffer):
            self._buffer = np.zeros((2 * len(matchers), self._num_own_words), np.int32)
        # The threads divide the list into runs: copies that share a lock stand together.
        order = sorted(range(len(matchers)), key=lambda index: matchers[index].compilation)
        rows = [(matchers[index].matcher, index) for index in order]
        num_threads = min(
            len({matcher.compilation for matcher in matchers}),
            -(-len(rows) // ROWS_PER_THREAD),
            self.limits.num_mask_threads,
        )
        if num_threads > 1:
            fill_next_token_bitmask_par(self._executor(num_threads), rows, self._buffer)
        else:
            for matcher, index in rows:
                fill_next_token_bitmask(matcher, self._buffer, index)
        return self._buffer[: len(matchers), : self.num_words]

    def _executor(self, num_threads: int) -> LLExecutor:
        """Return that many threads, or a few more: a power of two, up to the limit."""
        size = min(1 << (num_threads - 1).bit_length(), self.limits.num_mask_threads)
        if size not in self._threads:
            self._threads[size] = LLExecutor(size)
        return self._threads[size]

    def consume(self, pairs: "Sequence[tuple[GrammarMatcher, int]]") -> list[bool]:
        """Let each matcher take a token; return whether it did. One takes about 2 us, less than to
        wake a thread."""
        return [own.matcher.consume_token(token) for own, token in pairs]

    def forced(self, matcher: GrammarMatcher) -> list[int]:
        """Return the tokens that a matcher forces next: each is the only one that its mask would
        allow after those before it. The matcher takes none of them. An end-of-sequence token is
        never among them."""
        return self._forced(matcher.matcher)

    def forced_first(self, grammar: StructuredOutput) -> list[int]:
        """Return the tokens that a grammar forces at the start; none, if it is not compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        if compiled is None or not is_ready(compiled.first):
            return []
        return self._forced(compiled.first.result())

    def _forced(self, matcher: LLMatcher) -> list[int]:
        most = self.limits.max_jump
        tokens = matcher.compute_ff_tokens()[:most] if most else []
        # The tokenizer may have tokens that the model lacks.
        return list(itertools.takewhile(self._vocab_size.__gt__, tokens))

    def _compile_first(self, grammar: StructuredOutput, compiled: _Compiled) -> LLMatcher:
        """Compile a grammar, then submit the further compilations that its waiting requests need.
        The requests are released when the compilation submitted last is done."""
        with self._lock:
            if all(each.cancelled() for each in compiled.waiting or ()):
                del self._compiling[grammar]
                raise TimeoutError("all its requests have given up")
        began = time.monotonic()
        try:
            matcher = self._compile(grammar)
        except RequestError as error:
            for each in self._take_waiting(grammar, compiled):
                each.set_exception(error)
            raise
        compiled.is_quick = time.monotonic() - began < MAX_AGAIN_S
        waiting = self._take_waiting(grammar, compiled)
        with self._lock:
            again = self._compile_again(grammar, compiled, len(waiting))

        def release(_: object = None) -> None:
            for each in waiting:
                each.set_result(None)

        if again:
            again[-1].matcher.add_done_callback(release)
        else:
            release()
        return matcher

    def _take_waiting(self, grammar: StructuredOutput, compiled: _Compiled) -> "list[Future[None]]":
        """Note that a first compilation is done or failed. Return the requests that wait for it and
        have not given up."""
        with self._lock:
            waiting, compiled.waiting = compiled.waiting or [], None
            self._compiled[grammar] = self._compiling.pop(grammar)
            while len(self._compiled) > self.limits.max_cached:
                self._compiled.popitem(last=False)
        return [each for each in waiting if each.set_running_or_notify_cancel()]

    def _compile_again(
        self, grammar: StructuredOutput, compiled: _Compiled, num_requests: int
    ) -> list[_Compilation]:
        """Submit the compilations that so many requests at the same time lack, if the first one was
        quick."""
        if not compiled.is_quick or self._is_closed:
            return []
        most = self.limits.max_compilations or self.limits.num_mask_threads
        wanted = min(-(-num_requests // REQUESTS_PER_COMPILATION), most)
        count = wanted - len(compiled.compilations)
        return [self._submit(compiled, self._compile, grammar) for _ in range(count)]

    def _submit(
        self, compiled: _Compiled, compile: Callable[..., LLMatcher], *args: object
    ) -> _Compilation:
        """Compile on a thread. The caller holds the lock."""
        future = self._compiler.submit(compile, *args)
        compiled.compilations.append(_Compilation(next(self._numbers), future))
        return compiled.compilations[-1]

    def _compile(self, grammar: StructuredOutput) -> LLMatcher:
        try:
            text = _as_llguidance(grammar)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._parser_limits)
        except Exception as error:  # llguidance's converter of EBNF raises bare Exceptions
            raise refused(grammar, str(error)) from None
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        return matcher


def refused(grammar: StructuredOutput, reason: str) -> RequestError:
    """Return the refusal of a grammar."""
    return RequestError(
        f"the grammar cannot be used: {shortened(reason)}",
        field=f"{FIELD}.{grammar.kind}",
        value=grammar.text,
        fix="fix or simplify it",
    )


def shortened(reason: str) -> str:
    """Return llguidance's reason on one line, without the state dump that may follow."""
    line = " ".join(_STATE_DUMP.split(reason)[0].split()) or "it is invalid"
    return line if len(line) <= MAX_ERROR_LENGTH else f"{line[: MAX_ERROR_LENGTH - 3]}..."


def _as_llguidance(grammar: StructuredOutput) -> str:
    """Return a grammar as llguidance reads it. Raises ValueError and others."""
    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "choice":
        texts = json.loads(grammar.text)
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
            raise ValueError("it is not a JSON list of texts")
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, texts)))
    return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


def _load(model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    path = model / FILE_NAME
    ends, slices = list(eos_token_ids), list(SLICES)
    try:
        text = read_tokenizer_file(path).decode()
        try:
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends, slices=slices)
        except ValueError:  # the tokenizer has more tokens than the model
            return LLTokenizer(text, eos_token=ends, slices=slices)
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from None


def _unusable(model: Path, reason: str) -> ClientConfigError:
    return ClientConfigError(
        f"structured output is not possible with this model: {reason}",
        field="model",
        value=str(model),
        fix="use a model with a tokenizer.json and an eos_token_id, or no structured_outputs",
    )
