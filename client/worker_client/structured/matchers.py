"""The driver's ends of what mask processes hold: a grammar, a matcher, and the process itself.

A matcher cannot move between processes, so the driver knows what it takes to make it again: the
grammar and the tokens.
"""

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError
from worker_client.inputs.child_process import ChildEnded, ChildProcess
from worker_client.structured.mask_messages import (
    MAX_ROWS,
    Answers,
    Begin,
    End,
    Forget,
    Fork,
    Header,
    Load,
    Operation,
    Ready,
    Setup,
    Take,
    memory_bytes,
    rows_of,
)

MODULE: Final = "worker_client.structured.mask_process"
SEND_S: Final = 0.25
"""Time in which a process that waits for a message must take it."""
PATIENCE_S: Final = 0.025
"""CPU time of a process after which requests do not wait any longer for its masks in one step."""
SLOW_PATIENCE_S: Final = 0.002
"""The same for a grammar whose masks are known to take long."""
STARVED_S: Final = 0.3
"""Time after which they do not wait, however little CPU time it got."""
LOW_PRIORITY: Final = 10


@dataclass(slots=True, eq=False)
class Grammar:
    """A grammar of requests, compiled or on its way."""

    key: int
    source: StructuredOutput
    error: RequestError | None = None
    """Why it cannot be used."""
    first_mask: NDArray[np.int32] | None = None
    """The mask after the tokens that it forces at the start, once it is compiled."""
    forced: list[int] = field(default_factory=list)
    """Those tokens."""
    is_heavy: bool = False
    """It takes long to compile, or its masks do: it is served apart from others."""
    is_slow: bool = False
    """One of its masks has taken long: requests hardly wait for them."""
    home: "MaskProcess | None" = None
    """The process that serves it if it is heavy."""
    num_deaths: int = 0
    """Processes that have ended by themselves while they compiled it."""
    waiting: "list[Future[None]]" = field(default_factory=list)
    """Futures of requests that wait until it is compiled."""
    unplaced: "list[GrammarMatcher]" = field(default_factory=list)
    """Matchers that were begun before it was compiled."""

    @property
    def is_done(self) -> bool:
        """True if it is compiled or cannot be used."""
        return self.error is not None or self.first_mask is not None

    @property
    def is_awaited(self) -> bool:
        """True if a request waits for it and has not given up."""
        return bool(self.unplaced) or not all(each.cancelled() for each in self.waiting)


@dataclass(slots=True, eq=False)
class GrammarMatcher:
    """Follows one request through its grammar, in a mask process."""

    grammar: Grammar
    taken: list[int]
    """Tokens of the request."""
    forced: deque[int] = field(default_factory=deque)
    """Tokens that must follow, each the only one that its mask allows."""
    mask: NDArray[np.int32] | None = None
    """Tokens that may follow these, int32 [num_words]; None until it is known. It stays until the
    matcher takes a token behind the forced ones."""
    error: str = ""
    """Why it has failed."""
    process: "MaskProcess | None" = None
    """The process that has it; None if it must be made again."""
    row: int = -1
    num_deaths: int = 0
    """Processes that have ended by themselves while they computed its next mask."""

    @property
    def is_ready(self) -> bool:
        """True if the next mask is known, or the matcher has failed."""
        return self.mask is not None or bool(self.error)

    @property
    def is_overdue(self) -> bool:
        """True if requests should not wait for its mask any longer in this step."""
        if self.process is None or not self.process.is_ready:
            return True
        return self.process.is_overdue(SLOW_PATIENCE_S if self.grammar.is_slow else PATIENCE_S)

    def allows(self, token: int) -> bool:
        """Return True if a token may be next, by its mask."""
        if self.forced:
            return token == self.forced[0]
        return self.mask is not None and is_allowed(self.mask, token)


def is_allowed(mask: NDArray[np.int32], token: int) -> bool:
    """Return True if a mask, int32 [num_words], allows a token."""
    return token < 32 * mask.size and bool(int(mask[token // 32]) >> token % 32 & 1)


class MaskProcess:
    """One process: what was sent to it and what it has answered. It belongs to the driver's
    thread."""

    def __init__(self, setup: Setup, memory_limit: int) -> None:
        """Start it. setup: without its descriptor. Raises OSError."""
        self.matchers: dict[int, GrammarMatcher] = {}
        """By row."""
        self.known: dict[int, Grammar] = {}
        """Grammars that it has compiled or is to compile, by key."""
        self.is_ready = False
        """It has read the tokenizer."""
        self.is_busy = True
        """It has not answered all that was sent."""
        self.start_error = ""
        self.compile_s = 0.0
        """CPU time that it took for the grammars of the last batch."""
        self._num_words = -(-setup.vocab_size // 32)
        self._fd = os.memfd_create("masks", os.MFD_CLOEXEC)
        try:
            self.child = ChildProcess(MODULE, str(memory_limit), pass_fds=(self._fd,))
        except OSError:
            os.close(self._fd)
            raise
        self._header: Header | None = None
        self._masks = np.zeros((0, 0), np.int32)
        self._outbox: list[Operation] = []
        self._free: list[int] = []
        self._freed: list[int] = []
        """Rows that are free once the batch is answered: its answer may name them."""
        self._unused = iter(range(MAX_ROWS))
        self._sent_s = time.monotonic()
        self._sent_cpu_s = 0.0
        self._answers = msgspec.msgpack.Decoder(Answers)
        with suppress(ChildEnded):  # the next receive() raises it
            self._send(msgspec.structs.replace(setup, memory_fd=self._fd))

    def close(self) -> None:
        """Kill it."""
        self.child.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_closed(self) -> bool:
        """True if it was killed."""
        return self._fd < 0

    @property
    def is_compiling(self) -> bool:
        """True if its subject is a grammar that it compiles, not a matcher."""
        return self._header is not None and self._header.subject < 0

    @property
    def cpu_s(self) -> float:
        """CPU time of the process so far. Raises ChildEnded if it has none any more."""
        try:
            # Linux's clock of another process: CPUCLOCK_SCHED of its pid.
            return time.clock_gettime((~self.child.pid << 3) | 2)
        except OSError:
            raise ChildEnded from None

    def is_overdue(self, patience_s: float) -> bool:
        """Return True if it has worked on a batch for so long, or could not."""
        if not self.is_busy:
            return False
        try:
            cpu_s = self.cpu_s
        except ChildEnded:
            return False  # its end is noticed by the next receive()
        worked_s = cpu_s - self._sent_cpu_s
        return worked_s > patience_s or time.monotonic() - self._sent_s > STARVED_S

    def is_stopped(self, after_s: float) -> bool:
        """Return True if it got nearly no CPU time for so long. Raises ChildEnded."""
        is_late = self.is_busy and time.monotonic() - self._sent_s > after_s
        return is_late and self.cpu_s - self._sent_cpu_s < after_s / 100

    @property
    def working_s(self) -> float:
        """CPU time that it has spent on its subject. Raises ChildEnded."""
        if self._header is None or not self._header.subject:
            return 0.0
        return max(0.0, self.cpu_s - self._header.cpu_ns / 1e9)

    def has_worked(self, seconds: float) -> bool:
        """Return True if it has spent so much CPU time on its subject."""
        try:
            return self.working_s > seconds
        except ChildEnded:
            return False

    @property
    def matcher(self) -> GrammarMatcher | None:
        """The matcher that it works on, or was working on when it ended."""
        return None if self._header is None else self.matchers.get(self._header.subject - 1)

    @property
    def subject(self) -> Grammar | None:
        """The grammar that it works on, or was working on when it ended."""
        if self._header is not None and self._header.subject < 0:
            return self.known.get(-self._header.subject)
        return None if self.matcher is None else self.matcher.grammar

    def load(self, grammar: Grammar) -> None:
        """Let it compile a grammar, unless it has."""
        if grammar.key not in self.known:
            self.known[grammar.key] = grammar
            self._outbox.append(Load(grammar.key, grammar.source.kind, grammar.source.text))

    def forget(self, grammar: Grammar) -> None:
        """Let it drop a compiled grammar, if it has it."""
        if self.known.pop(grammar.key, None) is not None:
            self._outbox.append(Forget(grammar.key))

    def begin(self, matcher: GrammarMatcher) -> None:
        """Let it make a matcher, which asks for its mask unless that is known."""
        if self._give_row(matcher):
            self.load(matcher.grammar)
            tokens = [*matcher.taken, *matcher.forced]
            begin = Begin(matcher.row, matcher.grammar.key, tokens, not matcher.is_ready)
            self._outbox.append(begin)

    def fork(self, source: GrammarMatcher, matcher: GrammarMatcher, tokens: list[int]) -> None:
        """Let it make a matcher from one that is ready here, which stays as it is: behind that
        one's forced tokens it takes these, and asks for its mask."""
        if self._give_row(matcher):
            self._outbox.append(Fork(matcher.row, source.row, tokens))

    def _give_row(self, matcher: GrammarMatcher) -> bool:
        row = self._free.pop() if self._free else next(self._unused, -1)
        if row < 0:
            matcher.error = "too many requests with grammars run"
            return False
        matcher.process, matcher.row = self, row
        self.matchers[row] = matcher
        return True

    def take(self, matcher: GrammarMatcher, tokens: list[int]) -> None:
        """Let a matcher take tokens."""
        self._outbox.append(Take(matcher.row, tokens))

    def end(self, matcher: GrammarMatcher) -> None:
        """Let it drop a matcher."""
        del self.matchers[matcher.row]
        self._freed.append(matcher.row)
        # What was not sent yet must not reach the row's next matcher.
        self._outbox = [each for each in self._outbox if _row(each) != matcher.row]
        self._outbox.append(End(matcher.row))
        matcher.process = None

    def flush(self) -> None:
        """Send what is to be done, unless it is at work. Raises ChildEnded."""
        if self._outbox and not self.is_busy:
            batch, self._outbox = self._outbox, []
            self._send(batch)

    def _send(self, message: Setup | list[Operation]) -> None:
        self.is_busy = True
        self._sent_s, self._sent_cpu_s = time.monotonic(), self.cpu_s
        try:
            encoded = msgspec.msgpack.encode(message)
            self.child.messages.send(encoded, time.monotonic() + SEND_S)
        except TimeoutError:  # it is stopped
            raise ChildEnded from None

    def receive(self) -> Iterator[GrammarMatcher]:
        """Yield the matchers that have got their masks, or have failed. Raises ChildEnded."""
        while self.is_busy and (message := self.child.messages.receive(0.0)) is not None:
            if not self.is_ready:
                self._set_up(msgspec.msgpack.decode(message, type=Ready))
                continue
            answers = self._answers.decode(message)
            for masked in answers.masked:
                matcher = self.matchers.get(masked.row)
                if matcher is not None:  # else it was dropped meanwhile
                    matcher.error, matcher.num_deaths = masked.error, 0
                    matcher.forced = deque(masked.forced)
                    matcher.mask = None if masked.error else self._masks[masked.row]
                    yield matcher
            if answers.is_last:
                self.compile_s = answers.compile_s
                self.is_busy = False
                self._free += self._freed
                self._freed.clear()

    def _set_up(self, ready: Ready) -> None:
        self.is_ready, self.is_busy = True, False
        self.start_error = ready.error
        if not ready.error:
            memory = memoryview(mmap.mmap(self._fd, memory_bytes(ready.num_words)))
            self._header = Header(memory)
            self._masks = rows_of(memory, ready.num_words)[:, : self._num_words]

    def lower_priority(self) -> None:
        """Let others have the processors first, from now on."""
        try:
            os.setpriority(os.PRIO_PROCESS, self.child.pid, LOW_PRIORITY)
        except ProcessLookupError:
            return


def _row(operation: Operation) -> int | None:
    return None if isinstance(operation, Load | Forget) else operation.row
