"""Loads of prefixes beside steps: a waiting request whose prefix lies in host memory leaves the
line, steps go on meanwhile, and it comes back once its blocks are in the prefix cache.

Nothing depends on the news of their arrival but the time at which the request is admitted: a step
that uses one of the blocks earlier waits for it on the device.
"""

from typing import Final

from worker_client.scheduler.outside_blocks import OutsideBlocks
from worker_client.scheduler.prefix_search import Prefix
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_blocks import RequestBlocks
from worker_client.scheduler.request_queues import RequestQueues

LEAST_BLOCKS: Final = 64
"""Fewer are loaded by the step that admits the request: 128 MiB of the KV cache of an 8B model take
2.5 ms, which is less than the wait for the steps in between."""


class PrefixLoads:
    """Owned by a scheduler."""

    def __init__(
        self, outside: OutsideBlocks, queues: RequestQueues, blocks: RequestBlocks
    ) -> None:
        self._outside = outside
        self._queues = queues
        self._blocks = blocks
        self._loaded: dict[str, set[int]] = {}
        """Blocks that are loaded for requests out of line."""

    @property
    def is_loading(self) -> bool:
        """True if requests wait for loads."""
        return bool(self._loaded)

    def begin(self, request: Request, prefix: Prefix) -> bool:
        """Load the prefix of the first request in line beside steps, if others run meanwhile and it
        is worth it; then return True: the request is out of line. prefix: as found now, and there
        are blocks for it."""
        if request.blocks.were_loaded or not self._queues.running:
            return False
        if self._blocks.num_in_host_memory(prefix) < LEAST_BLOCKS:
            return False
        # What comes from files is loaded by the next step, which waits for it.
        self._loaded[request.id] = self._outside.load_beside(self._blocks.load(request, prefix))
        self._queues.load(request)
        return True

    def end_arrived(self) -> None:
        """Let requests be in line again of which no block is being loaded any more: all are there,
        or others have taken them."""
        for req_id, block_ids in [*self._loaded.items()]:
            if block_ids.isdisjoint(self._outside.loading_beside):
                self._release(req_id)

    def end_all(self) -> None:
        """Let all requests be in line again: nothing else is to be done, or what they load is lost.
        What is still being loaded stays where it is."""
        for req_id in [*self._loaded]:
            self._release(req_id)

    def _release(self, req_id: str) -> None:
        del self._loaded[req_id]
        self._queues.end_load(req_id)
