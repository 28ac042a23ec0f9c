"""Grammars that are compiled for the first time: each in a process that serves no request, and is
killed if nobody waits for it any longer."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from worker_client.inputs.child_process import ChildEnded
from worker_client.structured.matchers import Grammar, GrammarMatcher, MaskProcess

YIELD_S: Final = 0.5
"""CPU time after which a compilation makes room for others, and restarts after them."""
SPARE_S: Final = 0.05
"""CPU time of a compilation after which another process is started, for what comes next, and after
which it gets a lower priority."""
NUM_KEPT: Final = 2
"""Processes that are kept when nothing is compiled."""


class Trials:
    """Owns the processes that compile, and the grammars that wait for one."""

    def __init__(self, start: Callable[[], MaskProcess], num_compilers: int) -> None:
        self.processes: dict[MaskProcess, GrammarMatcher | None] = {}
        """Each with the matcher of its grammar's first mask, while it compiles one."""
        self._start = start
        self._most = 1 + num_compilers
        self._queue: deque[Grammar] = deque()

    def start(self) -> MaskProcess:
        """Start a process; return it."""
        process = self._start()
        self.processes[process] = None
        return process

    def add(self, grammar: Grammar) -> None:
        """Compile a grammar once there is a process for it."""
        self._queue.append(grammar)

    def remove(self, grammar: Grammar) -> MaskProcess | None:
        """Give up a grammar; return the process that compiles it, which is no more one of these."""
        if grammar in self._queue:
            self._queue.remove(grammar)
            return None
        for process, matcher in self.processes.items():
            if matcher is not None and matcher.grammar is grammar:
                del self.processes[process]
                return process
        return None

    def take_spare(self) -> MaskProcess:
        """Return a process that compiles nothing, which is no more one of these."""
        free = [process for process, matcher in self.processes.items() if matcher is None]
        spare = next((each for each in free if each.is_ready), None) or next(iter(free), None)
        if spare is None:
            return self._start()
        del self.processes[spare]
        return spare

    def finish(self, process: MaskProcess) -> GrammarMatcher | None:
        """Return the first matcher of a grammar whose trial has ended. The process is free, but for
        what it has compiled."""
        matcher = self.processes[process]
        if matcher is not None and not process.is_busy:
            self.processes[process] = None
            process.end(matcher)
            return matcher
        return None

    def proceed(self) -> None:
        """Compile what waits; start processes for it, and for what may come. Raises OSError."""
        free = [process for process, matcher in self.processes.items() if matcher is None]
        ready = [process for process in free if process.is_ready and not process.is_busy]
        # One stays free for those who need a spare at once.
        for process in ready if len(self.processes) == 1 else ready[:-1]:
            if not self._queue:
                break
            self._compile(process, self._queue.popleft())
            free.remove(process)
        if len(free) < NUM_KEPT and (self._queue or (not free and self._lasts())):
            if len(self.processes) < self._most:
                self.start()
            elif self._queue:
                self._make_room()
        elif not self.processes:
            self.start()

    def close_unneeded(self) -> None:
        """Kill the free processes beyond those that are kept."""
        free = [process for process, matcher in self.processes.items() if matcher is None]
        for process in free[: max(0, len(self.processes) - NUM_KEPT)] if not self._queue else ():
            del self.processes[process]
            process.close()

    def _compile(self, process: MaskProcess, grammar: Grammar) -> None:
        matcher = self.processes[process] = GrammarMatcher(grammar, [])
        process.begin(matcher)
        with suppress(ChildEnded):  # the next receive() raises it
            process.flush()

    def _lasts(self) -> bool:
        """Return True if a compilation takes long."""
        lasting = [process for process in self.processes if process.has_worked(SPARE_S)]
        for process in lasting:
            process.lower_priority()
        return bool(lasting)

    def _make_room(self) -> None:
        """Put a compilation that takes long behind those that wait."""
        for process, matcher in self.processes.items():
            if matcher is not None and process.has_worked(YIELD_S):
                del self.processes[process]
                process.close()
                self._queue.append(matcher.grammar)
                self.start()
                return
