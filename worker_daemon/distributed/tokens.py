"""Returns sampled tokens from the last stage to the others, without the driver.

Every rank starts the broadcast of a step at the same point of the same step. A stage waits for the
tokens only when a later step is about to read them. The last of several stages reads none.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from worker_daemon.distributed.link import Link
from worker_daemon.distributed.tp import communication


@dataclass(frozen=True, slots=True)
class _Publication:
    step: int
    """The number of the publication; see TokenBroadcast.publish."""
    work: dist.Work
    rows: Tensor
    tokens: Tensor
    counted: bool
    """True if refusals come with the tokens."""
    drafted: bool
    """True if drafts come with the tokens."""


class TokenBroadcast:
    """Brings each step's sampled tokens from the last stage into last_sampled, int64 [rows], of all
    other stages. If tokens may be refused, it also brings each row's number of refusals into
    refused, int32 [rows]; if the last stage makes drafts, these into drafts, int64 [rows, K]. It
    uses the pipeline group, and that group's stream."""

    def __init__(
        self,
        link: Link,
        last_sampled: Tensor,
        refused: Tensor,
        drafts: Tensor | None = None,
        *,
        num_stages: int,
        depth: int,
    ) -> None:
        """drafts: None if no stage makes any."""
        self._group = link.groups.pipeline
        self._last_stage = num_stages - 1
        self._last_sampled = last_sampled
        self._refused = refused
        self._drafts = drafts
        self._depth = depth
        self._in_flight: deque[_Publication] = deque()

    def shape(self, num_rows: int, *, counted: bool, drafted: bool = False) -> tuple[int, ...]:
        """Return the shape of a message: tokens, then refusals if counted, then drafts if the last
        stage makes any, and has made some in the step (drafted)."""
        num_drafts = self._drafts.shape[1] if drafted and self._drafts is not None else 0
        count = 1 + counted + num_drafts
        return (num_rows,) if count == 1 else (count, num_rows)

    def publish(
        self,
        step: int,
        rows: Tensor,
        tokens: Tensor | None,
        *,
        counted: bool,
        drafted: bool = False,
    ) -> None:
        """Start the return of tokens for rows int32 [R]. tokens: int64, as shape() says: those from
        which the rows continue; below them, if counted, each row's total refusals, then its drafts.
        None on stages that do not sample; counted and drafted are the same on all stages. tokens
        and rows may be overwritten at once.

        step: a number that increases with each publication.

        Raises:
            CommError: a peer is gone.
        """
        if tokens is None:
            rows = rows.long()  # a copy: the next step overwrites the step's own columns
            message = rows.new_empty(self.shape(rows.shape[0], counted=counted, drafted=drafted))
        else:
            message = tokens.clone()
        with communication("returning sampled tokens"):
            work = dist.broadcast(
                message, group=self._group, group_src=self._last_stage, async_op=True
            )
        assert work is not None, "the broadcast is asynchronous"
        if tokens is not None:  # the last of several stages never reads them
            rows, message = rows[:0].long(), message[..., :0]
        self._in_flight.append(_Publication(step, work, rows, message, counted, drafted))
        if len(self._in_flight) > self._depth:
            self._apply(self._in_flight.popleft())

    def collect(self, step: int) -> None:
        """Bring last_sampled up to date with all publications up to step. On CUDA only the stream
        waits."""
        while self._in_flight and self._in_flight[0].step <= step:
            self._apply(self._in_flight.popleft())

    def settle(self) -> None:
        """Wait for everything that was published."""
        while self._in_flight:
            self._apply(self._in_flight.popleft())

    def _apply(self, publication: _Publication) -> None:
        with communication("receiving sampled tokens"):
            publication.work.wait()
        rows, token_ids = publication.rows, publication.tokens
        if token_ids.dim() == 2:
            token_ids, *more = token_ids
            if publication.counted:
                self._refused[rows] = more.pop(0).int()
            if publication.drafted and self._drafts is not None:
                self._drafts[rows] = torch.stack(more, 1)
        self._last_sampled[rows] = token_ids
