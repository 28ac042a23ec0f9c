"""KVConnectors: all KV connectors of a runner, which do the moves of a step together."""

from collections.abc import Sequence

import numpy as np

from worker_daemon.device.transfers import LoadEnd
from worker_daemon.runner.connectors.beside import LoadsBeside
from worker_daemon.runner.connectors.interface import KVConnector, Loaded, StoreInStep
from worker_daemon.runner.scheduled_step import ScheduledStep


class KVConnectors:
    """Owned by the runner, used on the step thread. A step that moves nothing calls it only while
    loads run beside steps."""

    def __init__(self, connectors: Sequence[KVConnector]) -> None:
        """connectors: at least one; at most one of them loads beside steps, or stores in steps."""
        self._all = tuple(connectors)
        self.beside = LoadsBeside()
        """Loads that run beside steps."""

    @property
    def counts(self) -> tuple[object, ...]:
        """Their counts: see KVConnector."""
        return tuple(each.counts for each in self._all)

    def begin(self, step: ScheduledStep) -> Loaded | None:
        """Start what an accepted step moves: all stores before all loads, since one place may load
        into a block that another stores. Return the loads that the step waits for, if there are
        any. See KVConnector."""
        if self.beside.is_loading:
            moved = [each.moved_blocks(step) for each in self._all]
            self.beside.await_blocks(np.concatenate((step.block_updates.block_ids, *moved)))
        for connector in self._all:
            connector.store(step)
        for connector in self._all:
            beside = connector.load_beside(step)
            if beside is not None:
                self.beside.add(beside)
                self.beside.await_blocks(step.block_updates.block_ids)
        loads = [own for each in self._all if (own := each.load(step)) is not None]
        return _joined(loads) if len(loads) > 1 else next(iter(loads), None)

    def store_in_step(self, step: ScheduledStep) -> StoreInStep | None:
        """Return what stores the blocks that a step fills, after begin(); None: it stores none."""
        stores = (each.store_in_step(step) for each in self._all)
        return next((each for each in stores if each is not None), None)

    def settle(self) -> None:
        """Wait for all copies, before memory is freed."""
        for connector in self._all:
            connector.settle()


def _joined(loads: Sequence[Loaded]) -> Loaded:
    """Return the loads of several connectors as one."""
    return Loaded(
        np.concatenate([each.block_ids for each in loads]),
        [part for each in loads for part in each.is_bad],
        _AllLoads([each.end for each in loads]),
    )


class _AllLoads(LoadEnd):
    def __init__(self, arrivals: Sequence[LoadEnd]) -> None:
        self._all = arrivals

    @property
    def is_there(self) -> bool:
        return all(each.is_there for each in self._all)

    def await_in_steps(self) -> None:
        for each in self._all:
            each.await_in_steps()
