"""Custom logits processors, which requests enable by name. The configuration lists those to load.

Shapes: S rows, R rows that sample, V vocabulary, P processors.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import LogitsProcessors
from rpc_schema.step import NewRequestData
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits


class LogitsProcessorsPart(StepPart):
    """Lets each processor change the rows that enable it, in the configuration's order. The device
    memory that processors take is unknown, and no plan includes it."""

    request_extension = LogitsProcessors

    def __init__(self, context: PartContext) -> None:
        self._names = context.limits.logits_processors
        self._processors = [
            make(context.limits.vocab_size, context.device)
            for make in (context.processors.values() if context.is_last_stage else ())
        ]
        self._asks = np.zeros((len(self._names), context.num_rows), np.bool_)
        """[P, S] host"""

    def check(
        self, extension: LogitsProcessors, request: NewRequestData, limits: StepLimits
    ) -> None:
        refuse_fault(extension.find_fault(limits.logits_processors), request)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[LogitsProcessors | None]
    ) -> None:
        for request, own in zip(requests, extensions, strict=True):
            asked = () if own is None else own.names
            self._asks[:, request.slot] = [name in asked for name in self._names]

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        result = logits.to(torch.float32, copy=True)
        for asks, processor in zip(self._asks[:, rows.slots_np], self._processors, strict=True):
            places = np.flatnonzero(asks)
            if places.size == asks.size:
                result = processor(result, rows.positions)
            elif places.size:
                chosen = upload(places, logits.device)
                result[chosen] = processor(result[chosen], rows.positions[chosen])
        return result
