"""Balances the experts of a group beside its steps, every so many of them."""

import logging
from typing import Final

from rpc_schema.errors import WorkerError
from worker_client.driver_parts.context import DriverContext
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.errors import DeadlineExceeded, WorkerDied, config_error
from worker_client.group.experts import Rebalance

EPLB_STEP_INTERVAL: Final = 3000
"""Steps from one rebalance to the next where an option does not say it: vLLM's default."""
_LOG = logging.getLogger(__name__)


class ExpertsPart(DriverPart):
    """Moves the experts of one layer after another while steps go on, and switches each before a
    step, once its weights have come, until all are where the loads want them. A rebalance that
    fails is logged and ends; the next one comes at its time."""

    def __init__(self, context: DriverContext, step_interval: int) -> None:
        """step_interval: steps from the begin of one rebalance to that of the next.

        Raises:
            ClientConfigError: it is not positive, or the group was loaded without enable_eplb.
        """
        if step_interval < 1:
            problem, fix = "it is not a number of steps", "give 1 or more, or None"
            raise config_error("eplb_step_interval", step_interval, problem, fix)
        self._context = context
        self._step_interval = step_interval
        self._num_steps = 0
        """Steps since the last rebalance began."""
        self._rebalance: Rebalance | None = None
        context.group.experts.check_can_move()

    def settled(self, flight: StepInFlight) -> None:
        self._num_steps += 1

    def group_replaced(self) -> None:
        self._rebalance = None

    def prepare(self) -> None:
        if self._rebalance is None and self._num_steps < self._step_interval:
            return
        try:
            self._go_on()
        except WorkerDied as died:
            self._rebalance = None
            self._context.replace(died)
        except (WorkerError, DeadlineExceeded):  # logged by GroupExperts, and may be over next time
            self._rebalance = None

    def _go_on(self) -> None:
        if self._rebalance is None:
            self._num_steps = 0
            self._rebalance = self._context.group.experts.begin_rebalance()
        self._rebalance.advance()  # does not wait for weights
        if self._rebalance.is_done:
            report, self._rebalance = self._rebalance.report, None
            for layer, balance in report.layers.items():
                _LOG.info(
                    "layer %d: busiest rank over mean %.2f -> %.2f, %d experts moved",
                    *(layer, *balance),
                )


def expert_parts(context: DriverContext, step_interval: int | None) -> tuple[ExpertsPart, ...]:
    """Return the part of a driver that rebalances; none with None. Raises as ExpertsPart does."""
    return () if step_interval is None else (ExpertsPart(context, step_interval),)
