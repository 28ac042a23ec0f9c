"""Loads of prefixes beside steps: a waiting request whose prefix lies in host memory leaves the
line, steps go on meanwhile, and it comes back once its blocks are in the prefix cache, or are
expected to be there when the next step begins.

Nothing depends on the news of their arrival but the time at which the request is admitted: a step
that uses one of the blocks earlier waits for it on the device.
"""

from dataclasses import dataclass
from typing import Final

from worker_client.scheduler.outside_blocks import OutsideBlocks
from worker_client.scheduler.prefix_search import Prefix
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import RequestBlocks
from worker_client.scheduler.request_queues import RequestQueues
from worker_client.scheduler.step_budget import Clock

LEAST_BLOCKS: Final = 64
"""Fewer are loaded by the step that admits the request: 128 MiB of the KV cache of an 8B model take
2.5 ms, which is less than the wait for the steps in between."""
NEW_SHARE: Final = 0.5
"""Share of the newest measurement in the mean of a time."""
STEPS_SHARE: Final = 1.1
"""Share of the time of the steps in flight within which the end of a load has to be expected: for
the rest the step that uses it waits on the device."""


class LoadTimes:
    """Tells when loads are expected to end, by the time that earlier ones took for each block.
    They follow each other. Times are in seconds, as results of steps tell of them."""

    def __init__(self) -> None:
        self._block_s: float | None = None
        self._step_s: float | None = None
        self._last_result: float | None = None
        self._last_arrival = 0.0
        self._last_expected = 0.0

    def expect(self, now: float, num_blocks: int) -> float | None:
        """Return when a load that begins now will have ended; None: nobody knows."""
        if self._block_s is None:
            return None
        self._last_expected = max(now, self._last_expected) + num_blocks * self._block_s
        return self._last_expected

    def note_arrival(self, begun: float, now: float, num_blocks: int) -> None:
        """Note that a load has ended that was begun before, and when."""
        took = max(0.0, now - max(begun, self._last_arrival))
        self._block_s = _mean(self._block_s, took / num_blocks)
        self._last_arrival = now

    def note_result(self, now: float) -> None:
        """Note that a step's result has come, while loads are on their way."""
        if self._last_result is not None:
            self._step_s = _mean(self._step_s, now - self._last_result)
        self._last_result = now

    def pause(self) -> None:
        """Note that no load is on its way."""
        self._last_result = None
        self._last_expected = 0.0

    def ends_within(self, num_steps: int, now: float, expected: float | None) -> bool:
        """Return True if a load has probably ended when so many steps in flight have: a step that
        waits for the rest of one delays the tokens of all."""
        if expected is None or self._step_s is None:
            return False
        return expected - now <= STEPS_SHARE * num_steps * self._step_s


@dataclass(slots=True)
class _PrefixLoad:
    block_ids: set[int]
    begun: float
    expected: float | None
    """The time at which it will have ended; None: nobody knows."""
    num_blocks: int
    is_awaited: bool = True
    """Its request is out of line."""


class PrefixLoads:
    """Owned by a scheduler."""

    def __init__(
        self,
        outside: OutsideBlocks,
        queues: RequestQueues,
        blocks: RequestBlocks,
        clock: Clock,
    ) -> None:
        self._outside = outside
        self._queues = queues
        self._blocks = blocks
        self._clock = clock
        self._times = LoadTimes()
        self._loads: dict[str, _PrefixLoad] = {}
        """Loads by request, until they have arrived."""

    @property
    def is_loading(self) -> bool:
        """True if requests wait for loads."""
        return any(load.is_awaited for load in self._loads.values())

    def begin(self, request: Request, prefix: Prefix) -> bool:
        """Load the prefix of the first request in line beside steps, if others run meanwhile and it
        is worth it; then return True: the request is out of line. prefix: as found now, and there
        are blocks for it."""
        if request.blocks.were_loaded or not self._queues.running:
            return False
        if self._blocks.num_in_host_memory(prefix) < LEAST_BLOCKS:
            return False
        # What comes from files is loaded by the next step, which waits for it.
        block_ids = self._outside.load_beside(self._blocks.load(request, prefix))
        now, num_blocks = self._clock(), len(block_ids)
        expected = self._times.expect(now, num_blocks)
        self._loads[request.id] = _PrefixLoad(block_ids, now, expected, num_blocks)
        self._queues.load(request)
        return True

    def note_result(self, arrived_s_ago: float = 0.0) -> None:
        """Note that a step's result has come, and what it tells of arrivals: how long ago the last
        of them was."""
        if not self._loads:
            return
        now = self._clock()
        self._times.note_result(now)
        beside = self._outside.loading_beside
        ended = {
            req_id: load
            for req_id, load in self._loads.items()
            if load.block_ids.isdisjoint(beside)
        }
        if ended:  # several follow each other
            num_blocks = sum(load.num_blocks for load in ended.values())
            begun = min(load.begun for load in ended.values())
            self._times.note_arrival(begun, now - arrived_s_ago, num_blocks)
        for req_id in ended:
            self._release(req_id)
        if not self._loads:
            self._times.pause()

    def end_arrived(self, num_in_flight: int) -> None:
        """Let requests be in line again of which no block is being loaded any more, since others
        have taken them, or all will be there when the steps in flight have ended."""
        now = self._clock() if self._loads else 0.0
        for req_id, load in [*self._loads.items()]:
            if load.block_ids.isdisjoint(self._outside.loading_beside):
                self._release(req_id)
            elif load.is_awaited and self._times.ends_within(num_in_flight, now, load.expected):
                load.is_awaited = False
                self._queues.end_load(req_id)

    def end_all(self) -> None:
        """Let all requests be in line again: nothing else is to be done, or what they load is lost.
        What is still being loaded stays where it is."""
        for req_id in [*self._loads]:
            self._release(req_id)
        self._times.pause()

    def _release(self, req_id: str) -> None:
        if self._loads.pop(req_id).is_awaited:
            self._queues.end_load(req_id)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else (1 - NEW_SHARE) * before + NEW_SHARE * new
