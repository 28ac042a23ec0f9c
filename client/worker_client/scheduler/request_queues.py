"""Queues of unfinished requests: waiting, or running with blocks."""

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from worker_client.errors import RequestError
from worker_client.scheduler.decode_groups import DecodeGroups
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import RequestBlocks

Urgency: TypeAlias = Callable[[Request], Any]
"""A scheduler's policy: returns a request's key, by which it is compared with others; the lowest is
the most urgent. Waiting requests are admitted in the order of their keys, and of equal ones in the
order of arrival. If blocks are short, the running request with the highest key loses its own, and
of equal ones that which was admitted last. It is called whenever a request is queued: at first, and
after a preemption."""


def by_priority(request: Request) -> tuple[int, float]:
    """Return the key of the default policy: the lowest priority first, as in vLLM, then the
    earliest deadline."""
    return request.priority, request.deadline


def _place(request: Request) -> tuple[Any, int]:
    return request.urgency, request.arrival


class RequestQueues:
    """Waiting requests in order of urgency, and running ones in order of admission. A running
    request is in one of four places: `prefilling`, a decode group, `suspended`, or none, while its
    last token is being sampled. Others may read the collections; only the methods change them."""

    def __init__(
        self,
        blocks: RequestBlocks,
        groups: DecodeGroups,
        max_running: int,
        urgency: Urgency = by_priority,
    ) -> None:
        self.unfinished: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: dict[str, Request] = {}
        self.prefilling: dict[str, Request] = {}
        self.suspended: dict[str, bool] = {}
        """Running requests that take part in no step, by id; True: they were in `prefilling`."""
        self._behind: dict[str, list[Request]] = {}
        """Requests that wait behind another one's prompt, by its id."""
        self._held: dict[str, Request] = {}
        """Requests that `hold` took out of line, by id; not admitted until `release`."""
        self._loading: dict[str, Request] = {}
        """Requests that `load` took out of line, by id; not admitted until `end_load`."""
        self._urgency = urgency
        self.next_deadline = math.inf
        """No deadline of an unfinished request is earlier; infinity if none has any."""
        self._blocks = blocks
        self._groups = groups
        self._max_running = max_running
        self.num_refusing = 0
        """Unfinished requests whose tokens may be refused."""
        self.num_guided = 0
        """Unfinished requests whose drafts are not the device's."""
        self._num_arrivals = 0
        self._num_admissions = 0

    @property
    def is_full(self) -> bool:
        """True if no further request may run."""
        return len(self.running) >= self._max_running

    def check_unused(self, req_id: str, fix: str) -> None:
        """Raise RequestError if an unfinished request has this id."""
        if req_id in self.unfinished:
            raise RequestError("the id is in use", field="id", value=req_id, fix=fix)

    def add(self, request: Request, behind: str = "") -> None:
        """Queue a request: as the last arrival, unless it was adopted and has its place already.
        behind: the request whose prompt it shares; it waits until that one has computed it."""
        if request.arrival < 0:
            request.arrival = self._num_arrivals
        if request.arrival >= self._num_arrivals:
            self._num_arrivals = request.arrival + 1
        first = self.unfinished.get(behind) if behind else None  # never itself
        self.unfinished[request.id] = request
        self.num_refusing += request.traits.may_refuse
        self.num_guided += not request.traits.may_draft
        self.next_deadline = min(self.next_deadline, request.deadline)
        if first is not None and (first.id in self.prefilling or not first.is_running):
            self._behind.setdefault(behind, []).append(request)
        else:
            self._wait(request)

    def find_overdue(self, now: Callable[[], float], *, idle: bool) -> list[Request]:
        """Return the unfinished requests whose deadlines have passed, to be ended. now: returns
        seconds, as time.monotonic does. idle: only those that no step in flight names."""
        if (moment := now()) < self.next_deadline:
            return []
        late = {each for each in self.unfinished.values() if each.deadline <= moment}
        if idle:
            late = {r for r in late if not (r.is_running or r.num_in_flight or r.num_void)}
        left = (each.deadline for each in self.unfinished.values() if each not in late)
        self.next_deadline = min(left, default=math.inf)
        return sorted(late, key=lambda each: each.arrival)

    def victims(self) -> list[Request]:
        """Return the running requests, those that lose their blocks first at the end."""
        return sorted(self.running.values(), key=lambda each: (each.urgency, each.admission))

    def release_behind(self, req_id: str) -> None:
        """Move the requests that wait behind this one's prompt to `waiting`."""
        for request in self._behind.pop(req_id, ()):
            self._wait(request)

    def is_in_line(self, request: Request) -> bool:
        """Return True if an unfinished request may be admitted next: it does not run, is not held,
        and waits behind no other's prompt."""
        if request.is_running or self._is_out_of_line(request):
            return False
        return not any(request in line for line in self._behind.values())

    def hold(self, request: Request) -> None:
        """Take a waiting request out of line; it cannot be admitted until it is released."""
        if request.id in self._held:
            return
        if not self._is_out_of_line(request):
            self._leave_line(request)
        self._held[request.id] = request

    def release(self, req_id: str) -> None:
        """Let a held request wait in its place; ignore others."""
        request = self._held.pop(req_id, None)
        if request is not None and not self._is_out_of_line(request):
            self._wait(request)

    def load(self, request: Request) -> None:
        """Take a waiting request out of line until the blocks are there that it begins with."""
        self._leave_line(request)
        self._loading[request.id] = request

    def end_load(self, req_id: str) -> None:
        """Let a request that loads wait in its place again; ignore others."""
        request = self._loading.pop(req_id, None)
        if request is not None and not self._is_out_of_line(request):
            self._wait(request)

    def start(self, request: Request) -> None:
        """Let a waiting request run, with the blocks that it has."""
        self.waiting.remove(request)
        request.admission = self._num_admissions
        self._num_admissions += 1
        self.running[request.id] = self.prefilling[request.id] = request

    def end_prefill(self, request: Request) -> None:
        """Let a request decode, unless its last token is being sampled."""
        del self.prefilling[request.id]
        self.decode(request)

    def decode(self, request: Request) -> None:
        """Let a running request decode, unless its last token is being sampled. If it is suspended,
        it does so later."""
        if request.num_tokens < request.limit and request.id not in self.suspended:
            self._groups.join(request)

    def suspend(self, req_ids: Collection[str]) -> None:
        """Take these running requests out of steps, and let those go on that were before."""
        for req_id in [each for each in self.suspended if each not in req_ids]:
            request = self.running[req_id]
            if self.suspended.pop(req_id):
                self.prefilling[req_id] = request
            else:
                self.decode(request)
        for req_id in req_ids:
            if req_id in self.running and req_id not in self.suspended:
                self._groups.leave(self.running[req_id])
                self.suspended[req_id] = self.prefilling.pop(req_id, None) is not None

    def jump(self, request: Request) -> None:
        """Let a request that has jumped forward be admitted again by its next step, if it runs. It
        goes before all prompts, as decodes do."""
        if request.is_running:
            self._groups.leave(request)
            self.prefilling = {request.id: request, **self.prefilling}
            request.needs_admission = True

    def requeue(self, request: Request) -> None:
        """Let a running request wait again, without blocks."""
        self._stop(request)
        self._wait(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        del self.unfinished[request.id]
        self.num_refusing -= request.traits.may_refuse
        self.num_guided -= not request.traits.may_draft
        self.release_behind(request.id)
        if request.is_running:
            self._stop(request)
        elif not self._is_out_of_line(request):
            self._leave_line(request)
        self._held.pop(request.id, None)
        self._loading.pop(request.id, None)

    def _is_out_of_line(self, request: Request) -> bool:
        return request.id in self._held or request.id in self._loading

    def _leave_line(self, request: Request) -> None:
        line = next((own for own in self._behind.values() if request in own), None)
        if line is not None:
            line.remove(request)
        else:
            self.waiting.remove(request)

    def _wait(self, request: Request) -> None:
        request.urgency = self._urgency(request)
        if not self.waiting or _place(self.waiting[-1]) < _place(request):
            self.waiting.append(request)
        else:
            insort(self.waiting, request, key=_place)

    def _stop(self, request: Request) -> None:
        self._groups.leave(request)
        self.prefilling.pop(request.id, None)
        self.suspended.pop(request.id, None)
        del self.running[request.id]
        self._blocks.release(request)
        request.admission = -1
        request.needs_admission = False
