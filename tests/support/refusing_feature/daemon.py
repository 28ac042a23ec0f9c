"""Refuses tokens pseudo-randomly, by row and number of samples.

Shapes: S rows, R rows that sample.
"""

from collections.abc import Sequence

import numpy as np
import torch
from rpc_schema.random_refusals import RandomRefusals
from torch import Tensor

from rpc_schema.step import NewRequestData
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows


class RandomRefusalsPart(StepPart):
    """A share of refusals per row."""

    request_extension = RandomRefusals
    may_refuse = True

    def __init__(self, context: PartContext) -> None:
        self._percents = np.zeros(context.num_rows, np.int64)
        self._tries = np.zeros(context.num_rows, np.int64)

    def uses(self, extension: RandomRefusals) -> bool:
        return extension.percent > 0

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[RandomRefusals | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            self._percents[request.slot] = 0 if wanted is None else wanted.percent

    def refuse(self, token_ids: Tensor, rows: SampleRows) -> Tensor:
        slots = rows.slots_np
        self._tries[slots] += 1
        drawn = (self._tries[slots] * 2654435761 + slots * 40503) // 65536 % 100
        refused = (drawn < self._percents[slots]).astype(np.int32)
        return upload(refused, token_ids.device).to(torch.int32)
