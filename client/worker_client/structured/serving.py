"""The mask processes of running requests: where a matcher is made, and what becomes of the others
in a process if one takes long."""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from worker_client.structured.matchers import Grammar, GrammarMatcher, MaskProcess

STALL_S: Final = 0.01
"""CPU time of one mask after which the requests behind it get matchers elsewhere."""
MAX_SLOW: Final = 4
"""Processes that serve slow grammars."""
MATCHERS_PER_PROCESS: Final = 16
"""Matchers of a process before another is started."""


class ServingProcesses:
    """Owns these processes. A grammar that takes long to compile, or one of whose masks took long,
    is served by a process for such grammars."""

    def __init__(self, spare: Callable[[], MaskProcess], num_processes: int) -> None:
        """spare: returns a process that does nothing."""
        self._spare = spare
        self._most = num_processes
        self._quick: list[MaskProcess] = []
        self._slow: list[MaskProcess] = []

    @property
    def processes(self) -> Iterator[MaskProcess]:
        """All of them."""
        return chain(self._quick, self._slow)

    def add(self, process: MaskProcess) -> None:
        """Serve in this process, too."""
        self._quick.append(process)

    def adopt(self, process: MaskProcess, grammar: Grammar) -> bool:
        """Serve a grammar where it was compiled, since that took long. Return False if there are
        too many such processes: one of them will compile it again."""
        grammar.is_heavy = True
        if len(self._slow) >= MAX_SLOW:
            return False
        self._slow.append(process)
        grammar.home = process
        return True

    def place(self, matcher: GrammarMatcher) -> None:
        """Make a matcher in a process."""
        self._process_for(matcher.grammar).begin(matcher)

    def _process_for(self, grammar: Grammar) -> MaskProcess:
        if grammar.is_heavy:
            if grammar.home not in self._slow:
                if len(self._slow) < MAX_SLOW:
                    self._slow.append(self._spare())
                    grammar.home = self._slow[-1]
                else:
                    grammar.home = min(self._slow, key=_num_matchers)
            assert grammar.home is not None
            return grammar.home
        ready = [process for process in self._quick if process.is_ready]
        least = min(ready, key=_num_matchers, default=None)
        is_full = least is None or _num_matchers(least) >= MATCHERS_PER_PROCESS
        if is_full and len(self._quick) < self._most and len(ready) == len(self._quick):
            self._quick.append(self._spare())
            least = self._quick[-1] if self._quick[-1].is_ready else least
        return least or self._quick[-1]

    def relieve(self, process: MaskProcess) -> None:
        """Make matchers elsewhere if one takes long: its grammar keeps the process. Raises
        ChildEnded."""
        if process not in self._quick or process.working_s < STALL_S:
            return
        culprit = process.subject
        if culprit is None:
            return
        culprit.is_slow = culprit.is_heavy = True
        culprit.home = process
        process.lower_priority()
        self._quick.remove(process)
        self._slow.append(process)
        if not self._quick:
            self._quick.append(self._spare())
        self._move([each for each in process.matchers.values() if each.grammar is not culprit])

    def retire(self, process: MaskProcess) -> bool:
        """If there are too many slow processes, make the matchers of this one elsewhere, now that
        it works on nothing, and return True: it is none of these any longer."""
        if process not in self._slow or process.is_busy or len(self._slow) <= MAX_SLOW:
            return False
        self.remove(process)
        return True

    def remove(self, process: MaskProcess) -> None:
        """Make all matchers of a process elsewhere, and forget it."""
        if process in self._quick:
            self._quick.remove(process)
        elif process in self._slow:
            self._slow.remove(process)
        if not self._quick:
            self._quick.append(self._spare())
        self._move(list(process.matchers.values()))

    def _move(self, matchers: list[GrammarMatcher]) -> None:
        for matcher in matchers:
            if matcher.process is not None:
                matcher.process.end(matcher)
            if not matcher.error:
                self.place(matcher)


def _num_matchers(process: MaskProcess) -> int:
    return len(process.matchers)
