"""Blocks that no step in flight can touch: a load into them need not wait for these steps."""

from collections import deque
from collections.abc import Collection


class IdleBlocks:
    """Owned by OutsideBlocks. A block without a request, which nobody stores, is idle once a later
    step has sampled tokens: then the devices have done what was launched before that one."""

    def __init__(self) -> None:
        self._num_sent = self._num_ended = 0
        self._reached = 0
        """Number of the last step, from 1, that has ended with tokens."""
        self._busy_up_to = 0
        """No block is idle before a step with a larger number has: what was launched before this
        scheduler, or before a failure, may still run."""
        self._left: deque[tuple[int, Collection[int]]] = deque()
        """Blocks, and the last step that may touch them."""

    def leave(self, block_ids: Collection[int]) -> None:
        """Note blocks that no step touches but those sent so far."""
        if block_ids:
            self._left.append((self._num_sent, block_ids))

    def step_sent(self) -> None:
        """Note that a step is being sent."""
        self._num_sent += 1

    def step_ended(self, *, has_tokens: bool) -> None:
        """Note that the oldest step in flight has its result, before its requests end."""
        self._num_ended += 1
        if has_tokens:
            self._reached = self._num_ended
        while self._left and self._left[0][0] < self._reached:
            self._left.popleft()

    def steps_failed(self) -> None:
        """Note that there is no step in flight any more, since they have failed."""
        self._num_ended = self._busy_up_to = self._num_sent

    def have(self, block_ids: Collection[int]) -> bool:
        """Return True if all of these blocks, which no request has, are idle."""
        if self._reached <= self._busy_up_to:
            return False
        wanted = {*block_ids}
        return all(wanted.isdisjoint(left) for _, left in self._left)
