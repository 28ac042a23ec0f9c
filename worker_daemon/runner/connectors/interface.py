"""The interface of a KV connector: what moves whole blocks between the KV cache and another place,
at the borders of steps. A runner has one for each place (kv_connectors.py).

A connector checks nothing that differs between ranks before a step runs, and refuses no step: a
block that it cannot deliver is filled with NaN, so that every rank learns of it by the logits.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.runner.scheduled_step import ScheduledStep


class Loaded(NamedTuple):
    """The blocks that a step loads."""

    block_ids: Int32s
    """[L]"""
    is_bad: Sequence[Tensor]
    """bool, [L] together, on the host: True for blocks that were filled with NaN. To be read once
    they are known."""
    has_arrived: Callable[[], bool] | None
    """Returns True once is_bad is there; None: it is."""

    @property
    def is_known(self) -> bool:
        """True once it is known which blocks were filled with NaN, as it is when the step has
        run."""
        return self.has_arrived is None or self.has_arrived()

    @property
    def are_bad(self) -> Bools:
        """bool [L], once they are known: True for the blocks that were filled with NaN."""
        are_bad: Bools = torch.cat([*self.is_bad]).numpy()
        return are_bad

    @property
    def invalid_blocks(self) -> Int32s:
        """The blocks that were filled with NaN, once they are known."""
        invalid: Int32s = self.block_ids[self.are_bad]
        return invalid


class KVConnector(Protocol):
    """Owned by the runner, used on the step thread."""

    @property
    def counts(self) -> object:
        """Its counts, for any thread. They outlive it, and hold none of its memory."""

    def store(self, step: ScheduledStep) -> None:
        """Start what an accepted step stores: launches only, in the order of the device's work. It
        is read before the step loads or writes to it. Called once for the step.

        What this raises fails the step, as does load(). Then, as if a later part of the step had
        failed, nothing that it has stored is kept (BlockContents.fail).
        """

    def load(self, step: ScheduledStep) -> Loaded | None:
        """Start what it loads, after the stores of all connectors: it is there before the step
        reads it. Return the loads, if there are any."""

    def settle(self) -> None:
        """Wait for all copies, before memory is freed."""
