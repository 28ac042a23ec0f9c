"""Groups of requests that decode together, so that the stages of a pipeline work on different
requests."""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from worker_client.scheduler.request import Request
from worker_client.steps.drafts import NO_DRAFTS


class DecodedRequests(NamedTuple):
    """The requests that a step decodes, as in SchedulerOutput: the same objects in each step of a
    group that goes on in the same way."""

    req_ids: tuple[str, ...] = ()
    """Those without drafts."""
    num_drafts: Mapping[str, int] = NO_DRAFTS
    num_scheduled: Mapping[str, int] = NO_DRAFTS
    """Tokens of those with drafts."""


NONE_DECODED: Final = DecodedRequests()


class DecodeGroups:
    """One group of requests for each stage, scheduled round-robin. Sizes differ by at most
    max_imbalance."""

    def __init__(self, num_stages: int, max_imbalance: int = 1) -> None:
        """max_imbalance: more than 1 keeps requests in their groups, at the cost of unequal steps.
        A request that changes groups can miss a turn, which almost doubles the time to its next
        token. For the same reason, a new request then joins the group of the step that ended its
        prefill, if sizes permit."""
        self._max_imbalance = max_imbalance
        self._groups: list[dict[str, Request]] = [{} for _ in range(num_stages)]
        self._ids: list[tuple[str, ...] | None] = [None] * num_stages
        """Ids of a complete group, built when all of it is ready; None after a change."""
        self._drafted = [NONE_DECODED] * num_stages
        """The last step with drafts of each group."""
        self._turn = 0

    @property
    def is_empty(self) -> bool:
        """True if no request decodes."""
        return not any(self._groups)

    def join(self, request: Request) -> None:
        """Let a request decode from the next step on."""
        sizes = list(map(len, self._groups))
        index = sizes.index(min(sizes))
        latest = (self._turn - 1) % len(self._groups)
        if self._max_imbalance > 1 and sizes[latest] < sizes[index] + self._max_imbalance:
            index = latest
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
        larger = max(range(len(self._groups)), key=lambda i: len(self._groups[i]))
        if len(self._groups[larger]) > len(self._groups[smaller]) + self._max_imbalance:
            req_id, request = self._groups[larger].popitem()
            self._groups[smaller][req_id] = request
            self._ids[larger] = self._ids[smaller] = None

    def in_turn(self, before: int) -> Iterator[tuple[int, dict[str, Request]]]:
        """Yield each group, beginning with the one whose turn it is, with those of its requests
        whose last step was before that number. Groups without any are skipped."""
        for offset in range(len(self._groups)):
            index = (self._turn + offset) % len(self._groups)
            group = self._groups[index]
            ready = {req_id: r for req_id, r in group.items() if r.last_step < before}
            if len(ready) == len(group):
                self._ids[index] = self._ids[index] or tuple(group)
            if ready:
                yield index, ready

    def commit(
        self,
        step: int,
        index: int | None,
        decodes: Mapping[str, Request],
        drafts: Mapping[str, int] = NO_DRAFTS,
    ) -> DecodedRequests:
        """Record a step that decodes these requests of group `index`; none if index is None.
        drafts: those of each request with some."""
        index = self._turn if index is None else index
        if drafts:
            decoded = self._with_drafts(index, decodes, drafts)
            for req_id, count in drafts.items():
                request = decodes[req_id]
                request.num_computed += count
                request.num_tokens += count
                request.drafts.num_in_flight += count
        else:
            is_whole = len(decodes) == len(self._groups[index])
            decoded = DecodedRequests((self._ids[index] if is_whole else None) or tuple(decodes))
        complete = []
        for request in decodes.values():
            request.num_computed += 1
            request.num_tokens += 1
            request.last_step = step
            if request.num_tokens == request.limit:
                complete.append(request)
        for request in complete:
            self.leave(request)
        self._turn = (index + 1) % len(self._groups)
        return decoded

    def _with_drafts(
        self, index: int, decodes: Mapping[str, Request], drafts: Mapping[str, int]
    ) -> DecodedRequests:
        """Return the requests of a step with drafts."""
        req_ids = tuple([req_id for req_id in decodes if req_id not in drafts])
        last = self._drafted[index]
        if drafts != last.num_drafts or req_ids != last.req_ids:
            counts = {req_id: 1 + count for req_id, count in drafts.items()}
            self._drafted[index] = DecodedRequests(req_ids, {**drafts}, counts)
        return self._drafted[index]
