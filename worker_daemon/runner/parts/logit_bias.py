"""Biases that are added to the logits of some tokens of a row. They are stored on the device when a
request is admitted.

Shapes: S rows, R rows that sample, V vocabulary, K biases of a row.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import MAX_BIASED_TOKENS, LogitBias, unpack_token_ids
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_FLOAT32: Final = 4
_INT64: Final = 8


class LogitBiasPart(StepPart):
    """Adds each row's biases, in float32."""

    request_extension = LogitBias
    heaviest = LogitBias.of({0: 1.0})

    def __init__(self, context: PartContext) -> None:
        self._samples = context.is_last_stage
        shape = (context.num_rows if self._samples else 0, MAX_BIASED_TOKENS)
        self._token_ids = torch.zeros(shape, dtype=torch.int64, device=context.device)
        """[S, K]; padded with token 0, whose bias is then 0."""
        self._biases = torch.zeros(shape, dtype=torch.float32, device=context.device)
        self._counts = np.zeros(context.num_rows, np.int32)
        """[S] host"""

    def check(self, extension: LogitBias, request: NewRequestData, limits: StepLimits) -> None:
        refuse_fault(extension.find_fault(limits.vocab_size), request)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[LogitBias | None]
    ) -> None:
        if not self._samples:
            return
        slots_np = np.array([request.slot for request in requests], np.int64)
        counts = [0 if own is None else len(own.values) for own in extensions]
        # The slots' former biases are overwritten too.
        width = max(int(self._counts[slots_np].max(initial=0)), *counts)
        token_ids = np.zeros((len(requests), width), np.int64)
        biases = np.zeros((len(requests), width), np.float32)
        for index, (count, own) in enumerate(zip(counts, extensions, strict=True)):
            if own is not None:
                token_ids[index, :count] = unpack_token_ids(own.token_ids)
                biases[index, :count] = own.values
        device = self._biases.device
        slots = upload(slots_np, device)
        self._token_ids[slots, :width] = upload(token_ids, device)
        self._biases[slots, :width] = upload(biases, device)
        self._counts[slots_np] = counts

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        width, slots = int(self._counts[rows.slots_np].max(initial=0)), rows.slots.long()
        biased = logits.to(torch.float32, copy=True)
        # The biased ids of a row are distinct: the order of the additions does not matter.
        return biased.scatter_add_(1, self._token_ids[slots, :width], self._biases[slots, :width])

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        return (_INT64 + _FLOAT32) * MAX_BIASED_TOKENS

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and the rows' biases."""
        return num_rows * (vocab_size * _FLOAT32 + (_INT64 + _FLOAT32) * MAX_BIASED_TOKENS)
