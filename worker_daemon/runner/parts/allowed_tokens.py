"""The only tokens that a row may sample. They are stored on the device when a request is admitted.

Shapes: S rows, R rows that sample, V vocabulary, K allowed tokens of a row.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import (
    MAX_ALLOWED_TOKENS,
    AllowedTokens,
    pack_token_ids,
    unpack_token_ids,
)
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_INT32: Final = 4
_INT64: Final = 8
_ALL: Final = -1
"""Entry of a row that allows all tokens."""


class AllowedTokensPart(StepPart):
    """Sets the logits of all other tokens to -inf."""

    request_extension = AllowedTokens
    heaviest = AllowedTokens(token_ids=pack_token_ids((0,)))

    def __init__(self, context: PartContext) -> None:
        self._samples = context.is_last_stage
        shape = (context.num_rows if self._samples else 0, MAX_ALLOWED_TOKENS)
        self._token_ids = torch.full(shape, _ALL, dtype=torch.int32, device=context.device)
        """[S, K]; padded with the row's first token."""
        self._counts = np.zeros(context.num_rows, np.int32)
        """[S] host"""

    def check(self, extension: AllowedTokens, request: NewRequestData, limits: StepLimits) -> None:
        refuse_fault(extension.find_fault(limits.vocab_size), request)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[AllowedTokens | None]
    ) -> None:
        if not self._samples:
            return
        table = np.full((len(requests), MAX_ALLOWED_TOKENS), _ALL, np.int32)
        for row, request, allowed in zip(table, requests, extensions, strict=True):
            own = () if allowed is None else unpack_token_ids(allowed.token_ids)
            row[:] = own[0] if own else _ALL
            row[: len(own)] = own
            self._counts[request.slot] = len(own)
        device = self._token_ids.device
        slots = upload(np.array([request.slot for request in requests], np.int64), device)
        self._token_ids[slots] = upload(table, device)

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        # With deferred sampling, the only row that uses the part may have ended: all counts are 0.
        width = int(self._counts[rows.slots_np].max(initial=1))
        token_ids = self._token_ids[rows.slots.long(), :width].long()
        allows_all = token_ids[:, :1] < 0
        token_ids.clamp_(min=0)
        left = torch.where(allows_all, logits, logits.new_full((), -torch.inf))
        return left.scatter_(1, token_ids, logits.gather(1, token_ids))

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        return _INT32 * MAX_ALLOWED_TOKENS

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and for each row its allowed ids as int32 and as int64, with
        their logits."""
        tokens = (_INT32 + _INT64 + itemsize) * MAX_ALLOWED_TOKENS
        return num_rows * (vocab_size * itemsize + tokens)
