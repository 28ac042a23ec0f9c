"""Grammars of one model. They are compiled and their masks are computed in mask processes
(mask_process.py), since nobody knows before how long that takes: what exceeds a bound is killed.
No work for a request's grammar is done in the driver's process.

A grammar is first compiled on trial, in a process of no request. If that is quick, one of a few
serving processes compiles it again for its requests. Otherwise the process of the trial serves it
from then on. If a mask takes long in a serving process, the other matchers there are made again in
another one, and the grammar keeps that process until the mask is done or exceeds its bound.
"""

import itertools
import os
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rpc_schema.structured import StructuredOutput
from worker_client.errors import ClientConfigError, RequestError
from worker_client.inputs.child_process import ChildEnded, wait_readable
from worker_client.inputs.grammar_options import FIELD
from worker_client.structured.attended_clock import AttendedClock
from worker_client.structured.mask_messages import NO_TEXT, Setup
from worker_client.structured.masked_steps import TOO_LONG
from worker_client.structured.matchers import Grammar, GrammarMatcher, MaskProcess
from worker_client.structured.serving import ServingProcesses
from worker_client.structured.trials import Trials

QUICK_S: Final = 0.02
"""A grammar whose compilation and first mask took no longer is compiled again where others are
served."""
STOPPED_S: Final = 0.5
"""Time after which a process that gets no CPU time is replaced."""
START_S: Final = 120.0
"""Time in which the first process must have read the tokenizer."""
MAX_FAILED_STARTS: Final = 5
"""Processes in a row that end before they are ready, after which grammars are refused for a while.
One that becomes ready ends the row."""
RETRY_S: Final = 5.0
"""Time for which grammars are refused once there can be no processes. The next one starts them."""
_NO_PROCESS_FIX: Final = f"send it again after {RETRY_S:g} s; the host may lack memory"
_FIX: Final = "fix or simplify it"
_NO_TEXT_FIX: Final = "let a text match it: an alternative without the $ref or rule to itself"
MAX_DEATHS: Final = 2
"""Processes that end by themselves while they work on a grammar, after which it is refused."""


def _num_serving() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0)) * 3 // 4))


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds on compiling and using a grammar."""

    num_compilers: int = 4
    """Processes that compile, and so grammars that are compiled at a time. Two are kept."""
    num_serving: int = field(default_factory=_num_serving)
    """Processes that compute masks, one for each 16 requests. By default 3/4 of the processors, 8
    at most. Slow grammars have up to 4 more."""
    compile_s: float = 10.0
    """Seconds in which a grammar must be compiled, including the wait for a process, but not the
    time in which the driver attends to no grammar (attended_clock.py)."""
    mask_s: float = 1.0
    """CPU seconds in which a mask must be computed."""
    memory_bytes: int = 2 << 30
    """Memory that a process may take."""
    max_cached: int = 256
    """Grammars, compiled or refused, that are remembered for later requests."""
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


class Grammars:
    """Owns the mask processes. Belongs to the driver's thread."""

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
            ModuleNotFoundError: llguidance is not installed.
        """
        if find_spec("llguidance") is None:
            raise ModuleNotFoundError("No module named 'llguidance'", name="llguidance")
        self.limits = GrammarLimits() if limits is None else limits
        ends = tuple(token for token in eos_token_ids if token < vocab_size)
        if not ends:
            raise _unusable(model, "the model names no end-of-sequence token")
        self.num_words = -(-vocab_size // 32)
        """int32 words of a mask."""
        self._setup = _setup(model, vocab_size, ends, self.limits)
        self._keys = itertools.count(1)
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        """The least recently used first."""
        self._clock = AttendedClock()
        self._unplaced: deque[tuple[float, GrammarMatcher]] = deque()
        """Matchers of grammars that were not compiled, and when they give up, by this clock."""
        self._num_failed_starts = 0
        self._is_closed = False
        self._failure, self._failed_until = "", 0.0
        """Why there are no processes; the next grammar after that time starts them."""
        self._trials, self._serving = self._without_processes()
        self._serving.add(self._start())
        self._await(self._trials.start(), model)

    def _without_processes(self) -> tuple[Trials, ServingProcesses]:
        trials = Trials(self._start, self.limits.num_compilers)
        return trials, ServingProcesses(trials.take_spare, self.limits.num_serving)

    def _start(self) -> MaskProcess:
        return MaskProcess(self._setup, self.limits.memory_bytes)

    def _await(self, process: MaskProcess, model: Path) -> None:
        until, reason = time.monotonic() + START_S, ""
        try:
            while not process.is_ready and (left_s := until - time.monotonic()) > 0.0:
                wait_readable([process.child], left_s)
                list(process.receive())
            if not process.is_ready:
                reason = f"its tokenizer was not read within {START_S:.0f} s"
        except ChildEnded:
            reason = f"the process that reads it ended with {process.child.exit_code(1.0)}"
        if reason or process.start_error:
            self.close()
            raise _unusable(model, reason or process.start_error)

    @property
    def compile_s(self) -> float:
        """Seconds in which a grammar must be compiled."""
        return self.limits.compile_s

    @property
    def pids(self) -> list[int]:
        """Ids of the processes."""
        return [process.child.pid for process in self._processes]

    @property
    def _processes(self) -> list[MaskProcess]:
        return [*self._trials.processes, *self._serving.processes]

    def close(self) -> None:
        """Kill the processes, and cancel the futures of requests that wait for a grammar."""
        self._is_closed = True
        for process in self._processes:
            process.close()
        for grammar in self._grammars.values():
            for future in grammar.waiting:
                future.cancel()

    def compile(self, source: StructuredOutput) -> "Future[Any]":
        """Compile a request's grammar, unless it is compiled. The future is done, within proceed(),
        when the request can begin; it raises RequestError for a grammar that does not compile or
        exceeds the limits."""
        grammar = self._find(source)
        future: Future[Any] = Future()
        if grammar.error is not None:
            future.set_exception(grammar.error)
        elif grammar.is_done:
            future.set_result(None)
        else:
            grammar.waiting.append(future)
            future.add_done_callback(lambda _: self._abandon(grammar))
        return future

    def forced_first(self, source: StructuredOutput) -> list[int]:
        """Return the tokens that a grammar forces at the start; none, if it is not compiled."""
        grammar = self._grammars.get(source)
        return [] if grammar is None else list(grammar.forced)

    def begin(self, source: StructuredOutput, tokens: Sequence[int] = ()) -> GrammarMatcher:
        """Return a new matcher that takes the tokens of a request. Its mask is known at once if it
        has none yet and the grammar is compiled."""
        grammar = self._find(source)
        matcher = GrammarMatcher(grammar, list(tokens))
        if grammar.error is not None:
            matcher.error = grammar.error.reason
        elif not grammar.is_done:
            grammar.unplaced.append(matcher)
            self._unplaced.append((self._clock.read() + self.compile_s, matcher))
        else:
            self._place(matcher)
        return matcher

    def _place(self, matcher: GrammarMatcher) -> None:
        grammar, length = matcher.grammar, len(matcher.taken)
        if matcher.taken == grammar.forced[:length]:
            matcher.forced = deque(grammar.forced[length:])
            matcher.mask = grammar.first_mask
        try:
            self._serving.place(matcher)
        except OSError as error:
            self._give_up(f"its processes cannot be started: {error}")

    def take(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> None:
        """Let a matcher that is ready take tokens that its masks allow. Behind the forced ones it
        asks for its next mask; proceed() sends that."""
        matcher.taken += tokens
        left = deque(tokens)
        while left and matcher.forced:
            left.popleft()
            matcher.forced.popleft()
        if left and not matcher.error and matcher.process is not None:
            matcher.mask = None
            matcher.process.take(matcher, list(left))

    def fork(self, matcher: GrammarMatcher, tokens: Sequence[int]) -> GrammarMatcher:
        """Return a matcher that goes on behind the forced tokens of one that is ready, and takes
        these. The other one stays as it is. The new one fails if the grammar refuses them."""
        taken = [*matcher.taken, *matcher.forced, *tokens]
        forked = GrammarMatcher(matcher.grammar, taken, error=matcher.error)
        if matcher.process is not None:
            matcher.process.fork(matcher, forked, list(tokens))
        elif not forked.error:
            forked.error = "its grammar has no process"
        return forked

    def end(self, matcher: GrammarMatcher) -> None:
        """Give up the matcher of a request that has ended."""
        if matcher.process is not None:
            matcher.process.end(matcher)
        elif matcher in matcher.grammar.unplaced:
            matcher.grammar.unplaced.remove(matcher)
            self._abandon(matcher.grammar)

    def proceed(self, timeout_s: float = 0.0) -> None:
        """Send the processes what is to be done, and take their answers; wait for the first one at
        most timeout_s. See to what takes too long."""
        if self._is_closed or self._failure:
            return
        try:
            self._proceed(timeout_s)
        except OSError as error:
            self._give_up(f"its processes cannot be started: {error}")

    def _proceed(self, timeout_s: float) -> None:
        self._trials.proceed()
        now = self._clock.read()
        while self._unplaced and now > self._unplaced[0][0]:
            _, matcher = self._unplaced.popleft()
            if matcher in matcher.grammar.unplaced:
                matcher.error = TOO_LONG
                self.end(matcher)
        for process in self._processes:
            self._attend(process, process.flush)
        by_child = {process.child: process for process in self._processes}
        for child in wait_readable(list(by_child), timeout_s):
            process = by_child[child]
            self._attend(process, partial(self._receive, process))
        for process in self._processes:
            self._attend(process, partial(self._watch, process))
            self._attend(process, process.flush)

    def _attend(self, process: MaskProcess, action: Callable[[], None]) -> None:
        try:
            if not process.is_closed:
                action()
        except ChildEnded:
            self._ended(process)

    def _receive(self, process: MaskProcess) -> None:
        was_ready = process.is_ready
        for _ in process.receive():
            pass
        if process.start_error:
            raise ChildEnded
        if process.is_ready and not was_ready:
            self._num_failed_starts = 0
        if process in self._trials.processes:
            first = self._trials.finish(process)
            if first is not None:
                self._tried(process, first)
        elif self._serving.retire(process):
            process.close()

    def _tried(self, process: MaskProcess, first: GrammarMatcher) -> None:
        """Note the outcome of a trial, and release the requests that wait for it."""
        grammar = first.grammar
        if first.mask is not None:
            grammar.first_mask, grammar.forced = first.mask.copy(), list(first.forced)
        is_kept = False
        if not first.error and process.compile_s > QUICK_S:
            is_kept = self._serving.adopt(process, grammar)
        if is_kept:
            del self._trials.processes[process]
        else:
            process.forget(grammar)
        self._trials.close_unneeded()
        if first.error:
            self._refuse(grammar, first.error)
        else:
            self._release(grammar)
        self._evict()

    def _release(self, grammar: Grammar) -> None:
        waiting, grammar.waiting = grammar.waiting, []
        unplaced, grammar.unplaced = grammar.unplaced, []
        for future in waiting:
            if not future.set_running_or_notify_cancel():
                continue
            if grammar.error is None:
                future.set_result(None)
            else:
                future.set_exception(grammar.error)
        for matcher in unplaced:
            if grammar.error is None:
                self._place(matcher)
            else:
                matcher.error = grammar.error.reason

    def _watch(self, process: MaskProcess) -> None:
        """Look for work that takes too long, and for a process that does not run."""
        if not process.is_ready or not process.is_busy:
            return
        if process.is_stopped(STOPPED_S):
            self._ended(process, is_to_blame=False)
        else:
            self._serving.relieve(process)

    def _ended(self, process: MaskProcess, *, is_to_blame: bool = True) -> None:
        """Replace a process that has ended, or is to; refuse the grammar that has ended it."""
        grammar, matcher = process.subject, process.matcher
        code = process.child.exit_code(1.0) if is_to_blame else None
        trial = self._trials.processes.pop(process, None)
        process.close()
        if not process.is_ready or process.start_error:
            self._num_failed_starts += 1
        if grammar is not None and is_to_blame:
            blamed = grammar if matcher is None or matcher is trial else matcher
            blamed.num_deaths += 1
            if code == -signal.SIGPROF:
                self._refuse(grammar, self._too_long(is_compiling=process.is_compiling))
            elif blamed.num_deaths >= MAX_DEATHS:
                self._refuse(grammar, "its process ends, for lack of memory perhaps")
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self._give_up(process.start_error or "its processes end before they are ready")
            return
        if trial is not None and not trial.grammar.is_done:
            self._trials.add(trial.grammar)
        self._serving.remove(process)

    def _too_long(self, *, is_compiling: bool) -> str:
        if is_compiling:
            return f"it takes more than {self.limits.compile_s:g} s to compile"
        return f"one of its masks takes more than {self.limits.mask_s:g} s"

    def _refuse(self, grammar: Grammar, reason: str, fix: str = _FIX) -> None:
        """End the requests with a grammar, and refuse those to come."""
        grammar.error = refused(grammar.source, reason, fix)
        for process in self._processes:
            for matcher in list(process.matchers.values()):
                if matcher.grammar is grammar:
                    process.end(matcher)
                    matcher.error = grammar.error.reason
        self._release(grammar)

    def _give_up(self, reason: str) -> None:
        """Refuse all grammars for a while: there can be no processes."""
        self._failure, self._failed_until = reason, time.monotonic() + RETRY_S
        known, self._grammars = self._grammars, OrderedDict()
        for grammar in known.values():
            self._refuse(grammar, reason, _NO_PROCESS_FIX)
        for process in self._processes:
            process.close()
        self._trials, self._serving = self._without_processes()

    def _find(self, source: StructuredOutput) -> Grammar:
        if (found := self._grammars.get(source)) is not None:
            self._grammars.move_to_end(source)
            return found
        found = Grammar(next(self._keys), source)
        if self._is_closed:
            found.error = refused(source, "the driver's grammars are closed")
        elif self._has_processes():
            self._grammars[source] = found
            self._trials.add(found)
        else:
            found.error = refused(source, self._failure, _NO_PROCESS_FIX)
        return found

    def _has_processes(self) -> bool:
        """Return False if they have failed; some time after, start them."""
        if self._failure and time.monotonic() >= self._failed_until:
            self._failure, self._num_failed_starts = "", 0
            try:
                self._serving.add(self._start())
            except OSError as error:
                self._give_up(f"its processes cannot be started: {error}")
        return not self._failure

    def _abandon(self, grammar: Grammar) -> None:
        """Stop the compilation of a grammar for which nobody waits any longer."""
        if grammar.is_done or grammar.is_awaited or self._is_closed:
            return
        process = self._trials.remove(grammar)
        if process is not None:
            is_long = process.has_worked(self.limits.compile_s / 2)
            process.close()
            if is_long:
                self._refuse(grammar, self._too_long(is_compiling=True))
                return
        del self._grammars[grammar.source]

    def _evict(self) -> None:
        """Forget the grammars that were not used for longest."""
        done = [grammar for grammar in self._grammars.values() if grammar.is_done]
        for grammar in done[: max(0, len(self._grammars) - self.limits.max_cached)]:
            del self._grammars[grammar.source]
            for process in self._serving.processes:
                process.forget(grammar)


def refused(grammar: StructuredOutput, reason: str, fix: str = _FIX) -> RequestError:
    """Return the refusal of a grammar."""
    return RequestError(
        f"the grammar cannot be used: {reason}",
        field=f"{FIELD}.{grammar.kind}",
        value=grammar.text,
        fix=_NO_TEXT_FIX if reason == NO_TEXT else fix,
    )


def _setup(
    model: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits
) -> Setup:
    return Setup(
        str(model.absolute()),
        vocab_size,
        eos_token_ids,
        memory_fd=-1,
        max_grammar_size=limits.max_grammar_size,
        max_lexer_states=limits.max_lexer_states,
        initial_lexer_fuel=limits.initial_lexer_fuel,
        step_lexer_fuel=limits.step_lexer_fuel,
        step_max_items=limits.step_max_items,
        max_jump=limits.max_jump,
        compile_s=limits.compile_s,
        mask_s=limits.mask_s,
    )


def _unusable(model: Path, reason: str) -> ClientConfigError:
    return ClientConfigError(
        f"structured output is not possible with this model: {reason}",
        field="model",
        value=str(model),
        fix="use a model with a tokenizer.json and an eos_token_id, or no structured_outputs",
    )
