"""Log probabilities of the tokens that a request names, at each position that it samples. They use
the same logits as those of the most likely tokens (token_logprobs.py).

Shapes: S rows, R rows that sample, V vocabulary, K named tokens of a row.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import MAX_LOGPROB_TOKEN_IDS, GivenLogprobs, LogprobTokens
from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import pack_token_ids, unpack_token_ids
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import (
    Chosen,
    PartContext,
    Report,
    StepPart,
    refuse_fault,
)
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_INT64: Final = 8


class LogprobTokensPart(StepPart):
    """Reports log probabilities of the tokens that requests name. All rows of a step report as many
    as the row that names the most.

    Needs no sampling_bytes: it takes less temporary memory than token_logprobs.py, which the memory
    profile counts, and the two never hold theirs at the same time.
    """

    request_extension = LogprobTokens
    heaviest = LogprobTokens(token_ids=pack_token_ids((0,)))

    def __init__(self, context: PartContext) -> None:
        self._samples = context.is_last_stage
        shape = (context.num_rows if self._samples else 0, MAX_LOGPROB_TOKEN_IDS)
        self._token_ids = torch.zeros(shape, dtype=torch.int64, device=context.device)
        """[S, K]"""
        self._counts = np.zeros(context.num_rows, np.int32)
        """[S] host"""

    def check(self, extension: LogprobTokens, request: NewRequestData, limits: StepLimits) -> None:
        refuse_fault(extension.find_fault(limits.vocab_size), request)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[LogprobTokens | None]
    ) -> None:
        if not self._samples:
            return
        table = np.zeros((len(requests), MAX_LOGPROB_TOKEN_IDS), np.int64)
        for row, request, named in zip(table, requests, extensions, strict=True):
            own = () if named is None else unpack_token_ids(named.token_ids)
            row[: len(own)] = own
            self._counts[request.slot] = len(own)
        device = self._token_ids.device
        slots = upload(np.array([request.slot for request in requests], np.int64), device)
        self._token_ids[slots] = upload(table, device)

    def report(self, logits: Tensor, chosen: Chosen, rows: SampleRows) -> Report:
        width = int(self._counts[rows.slots_np].max(initial=1))
        named = self._token_ids[rows.slots.long(), :width]
        total = logits.float().logsumexp(dim=1, keepdim=True)
        logprobs = logits.gather(1, named).float() - total
        return Report(GivenLogprobs(width=width), (logprobs,))

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        return _INT64 * MAX_LOGPROB_TOKEN_IDS
