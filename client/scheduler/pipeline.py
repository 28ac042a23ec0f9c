"""Who decodes in which step, so that the stages of a pipeline work on different requests: a group of
requests for each stage, and the steps in flight. Knows no prompts, no blocks and no budget."""

from collections import deque
from collections.abc import Iterator, Mapping

from client.scheduler.request import Request


class Pipeline:
    """Owns the decode groups, which have their turns in a circle and are kept equal within one, and
    the numbers of steps."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.next_step = 0
        self._groups: list[dict[str, Request]] = [{} for _ in range(num_stages)]
        self._ids: list[tuple[str, ...] | None] = [None] * num_stages
        """Of each whole group; None once somebody has joined or left."""
        self._turn = 0
        self._in_flight: deque[int] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no step is in flight."""
        return not self._in_flight

    def join(self, request: Request) -> None:
        """Let a request decode from the next step on."""
        index = min(range(self.num_stages), key=lambda i: len(self._groups[i]))
        self._groups[index][request.id] = request
        self._ids[index] = None

    def leave(self, request: Request) -> None:
        """Let a request decode no more, if it did."""
        for index, group in enumerate(self._groups):
            if group.pop(request.id, None) is not None:
                self._ids[index] = None
                self._balance(index)
                return

    def _balance(self, smaller: int) -> None:
        larger = max(range(self.num_stages), key=lambda i: len(self._groups[i]))
        if len(self._groups[larger]) > len(self._groups[smaller]) + 1:
            req_id, request = self._groups[larger].popitem()
            self._groups[smaller][req_id] = request
            self._ids[larger] = self._ids[smaller] = None

    def in_turn(self, *, ahead: bool) -> Iterator[tuple[int, list[Request]]]:
        """Yield each group of whom somebody can decode, and these, from the one whose turn it is.

        A request decodes at most once in as many consecutive steps in flight as there are stages;
        `ahead`, where there is nothing else to do, more often.
        """
        before = self.next_step
        if self._in_flight and not ahead:
            before = max(before - self.num_stages + 1, self._in_flight[0])
        for offset in range(self.num_stages):
            index = (self._turn + offset) % self.num_stages
            group = self._groups[index]
            ready = [request for request in group.values() if request.last_step < before]
            if len(ready) == len(group):
                self._ids[index] = self._ids[index] or tuple(group)
            if ready:
                yield index, ready

    def send(self, index: int | None, decodes: Mapping[str, Request]) -> tuple[str, ...]:
        """Count a step in which these of a group decode, or nobody. Return their ids: the same
        object for as long as it is the whole group, and that stays."""
        group = self._turn if index is None else index
        req_ids = self._ids[group] if len(decodes) == len(self._groups[group]) else None
        req_ids = req_ids or tuple(decodes)
        for request in decodes.values():
            request.num_computed += 1
            request.num_tokens += 1
            request.last_step = self.next_step
        for request in [r for r in decodes.values() if r.num_tokens == r.limit]:
            self.leave(request)
        self._turn = (group + 1) % self.num_stages
        self._in_flight.append(self.next_step)
        self.next_step += 1
        return req_ids

    def has_result(self) -> None:
        """Count the oldest step in flight as over."""
        if self._in_flight:
            self._in_flight.popleft()

    def has_lost(self, num_steps: int) -> None:
        """Count the last steps in flight as failed."""
        for _ in range(num_steps):
            self._in_flight.pop()
