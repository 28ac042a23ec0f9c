"""Random sampling: keeps each row's temperature, filters and seed on the device, and chooses
tokens. Greedy rows take part with a temperature of 0.

Shapes: S rows, R rows that sample, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import MIN_TEMPERATURE, RandomSampling
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.sampling import SamplingMetadata
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits, invalid
from worker_daemon.sample.sampler import drawn_logprobs

_TABLE_COLUMNS: Final = 6
"""int32 values of a row: temperature, top_p and min_p as float32 bits, top_k, then the two
int32 halves of the int64 seed, at an even column; the number of columns is even."""
_INT32: Final = 4
_GREEDY: Final = RandomSampling()
_ALL_FEATURES: Final = (True, True, True, True)


class RandomSamplingPart(StepPart):
    """Chooses tokens by (seed, position, logits)."""

    request_extension = RandomSampling
    heaviest = RandomSampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=1)

    def __init__(self, context: PartContext) -> None:
        self._samples = context.is_last_stage
        self._sampling = context.sampling
        shape = (context.num_rows, _TABLE_COLUMNS)
        self._table = torch.empty(shape, dtype=torch.int32, device=context.device)
        self._table[:] = torch.from_numpy(_table_row(_GREEDY)).to(context.device)
        self._features = np.zeros((context.num_rows, 4), np.bool_)
        """[S, 4] flags: the row samples randomly; and if so, it has a top_k, a top_p, a min_p."""

    def check(self, extension: RandomSampling, request: NewRequestData, limits: StepLimits) -> None:
        if 0 < extension.temperature < MIN_TEMPERATURE:
            field = f"scheduled_new_reqs[{request.req_id}].temperature"
            fix = f"0 for the most likely token, or at least {MIN_TEMPERATURE}"
            raise invalid(field, extension.temperature, fix)

    def uses(self, extension: RandomSampling) -> bool:
        return extension.temperature > 0

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[RandomSampling | None]
    ) -> None:
        if not self._samples:
            return
        rows = np.empty((len(requests), 1 + _TABLE_COLUMNS), np.int32)
        for row, request, drawn in zip(rows, requests, extensions, strict=True):
            params = drawn or _GREEDY
            row[0] = request.slot
            row[1:] = _table_row(params)
            is_random = params.temperature > 0
            self._features[request.slot] = (
                is_random,
                is_random and params.top_k > 0,
                is_random and params.top_p < 1,
                is_random and params.min_p > 0,
            )
        on_device = upload(rows, self._table.device)
        self._table[on_device[:, 0].long()] = on_device[:, 1:]

    def choose(self, logits: Tensor, rows: SampleRows) -> Tensor:
        return self._sampling.tokens(logits, self.metadata(rows))

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, rows: SampleRows, *, are_drawn: bool
    ) -> Tensor:
        return drawn_logprobs(logits, token_ids, self.metadata(rows), are_drawn=are_drawn)

    def launch_sampling(self, logits: Tensor, rows: SampleRows) -> None:
        self.choose_any(logits, rows.slots, rows.positions)

    def choose_any(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        return self._sampling.tokens(logits, self._gather(rows, positions, _ALL_FEATURES))

    def metadata(self, rows: SampleRows) -> SamplingMetadata:
        """Gather the sampling parameters of the rows, without padding."""
        features: list[bool] = np.any(self._features[rows.slots_np], axis=0).tolist()
        return self._gather(rows.slots, rows.positions, features)

    def _gather(
        self, rows: Tensor, positions: Tensor, features: Sequence[bool]
    ) -> SamplingMetadata:
        """features: as for _features, of any of the rows."""
        table = self._table.index_select(0, rows)
        floats = table.view(torch.float32)
        return SamplingMetadata(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=table[:, 3],
            seeds=table.view(torch.int64)[:, 2],
            positions=positions.long(),
            any_random=features[0],
            any_top_k=features[1],
            any_top_p=features[2],
            any_min_p=features[3],
        )

    @staticmethod
    def row_bytes() -> int:
        return _INT32 * _TABLE_COLUMNS


def _table_row(params: RandomSampling) -> Int32s:
    row = np.empty(_TABLE_COLUMNS, np.int32)
    row[:3] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    row[3] = params.top_k
    row[4:] = np.array([params.seed], np.uint64).view(np.int32)
    return row
