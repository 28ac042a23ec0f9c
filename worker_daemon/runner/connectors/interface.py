"""The interface of a KV connector: what moves whole blocks between the KV cache and another place,
at the borders of steps. A runner has one for each place (kv_connectors.py).

A connector checks nothing that differs between ranks before a step runs, and refuses no step: a
block that it cannot deliver is filled with NaN, so that every rank learns of it by the logits.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.device.transfers import LoadEnd
from worker_daemon.runner.scheduled_step import ScheduledStep


class Loaded(NamedTuple):
    """The blocks that a step loads."""

    block_ids: Int32s
    """[L]"""
    is_bad: Sequence[Tensor]
    """bool, [L] together, on the host: True for blocks that were filled with NaN. To be read once
    they are known."""
    end: LoadEnd

    @property
    def is_known(self) -> bool:
        """True once the blocks are there, and it is known which were filled with NaN. If steps wait
        for the load, it is known when the step has run."""
        return self.end.is_there

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


NO_BLOCKS: Final = np.zeros(0, np.int32)


class StoreInStep(Protocol):
    """The store of blocks that a step fills, while it fills them. What it raises fails the step, as
    for KVConnector.store(). Without end(), nothing that it has stored is kept."""

    @property
    def watches_layers(self) -> bool:
        """False: layer_written() need not be called."""

    def layer_written(self, layer: int) -> None:
        """Start to store what is there once the work is done that was launched so far: all of this
        rank's layers up to this number. Launches only."""

    def end(self) -> None:
        """Start to store all else, once everything of the step was launched."""


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

    def store_in_step(self, step: ScheduledStep) -> StoreInStep | None:
        """Return what stores blocks as the step fills them; None: it has no such. Called before the
        forward pass."""

    def load(self, step: ScheduledStep) -> Loaded | None:
        """Start what it loads, after the stores of all connectors: it is there before the step
        reads it. Return the loads, if there are any."""

    def load_beside(self, step: ScheduledStep) -> Loaded | None:
        """Start what it loads beside steps: later steps wait for the arrival of blocks that they
        use. Return these loads, if there are any; they end in the order in which they began."""

    def moved_blocks(self, step: ScheduledStep) -> Int32s:
        """Return the blocks that it stores or loads."""

    def settle(self) -> None:
        """Wait for all copies, before memory is freed."""
