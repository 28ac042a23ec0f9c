"""KVConnectors: all KV connectors of a runner, which do the moves of a step together."""

from collections.abc import Callable, Sequence

import numpy as np

from worker_daemon.runner.connectors.interface import KVConnector, Loaded
from worker_daemon.runner.scheduled_step import ScheduledStep


class KVConnectors:
    """Owned by the runner, used on the step thread. A step that moves nothing does not call it."""

    def __init__(self, connectors: Sequence[KVConnector]) -> None:
        """connectors: at least one."""
        self._all = tuple(connectors)

    @property
    def counts(self) -> tuple[object, ...]:
        """Their counts: see KVConnector."""
        return tuple(each.counts for each in self._all)

    def begin(self, step: ScheduledStep) -> Loaded | None:
        """Start what an accepted step moves: all stores before all loads, since one place may load
        into a block that another stores. Return the loads, if there are any. See KVConnector."""
        for connector in self._all:
            connector.store(step)
        loads = [own for each in self._all if (own := each.load(step)) is not None]
        return _joined(loads) if len(loads) > 1 else next(iter(loads), None)

    def settle(self) -> None:
        """Wait for all copies, before memory is freed."""
        for connector in self._all:
            connector.settle()


def _joined(loads: Sequence[Loaded]) -> Loaded:
    """Return the loads of several connectors as one."""
    waits = [each.has_arrived for each in loads if each.has_arrived is not None]
    return Loaded(
        np.concatenate([each.block_ids for each in loads]),
        [part for each in loads for part in each.is_bad],
        _all_of(waits) if waits else None,
    )


def _all_of(waits: Sequence[Callable[[], bool]]) -> Callable[[], bool]:
    return lambda: all(has_arrived() for has_arrived in waits)
