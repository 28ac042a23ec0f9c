"""Reports two log probabilities of each sampled token: under the model alone, and under the
distribution that it was drawn from.

The first comes from the logits that no other part has changed, so this part comes before all that
change them. The second is the chooser's.

Shapes: S rows, R samples, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import FullLogprobs, FullLogprobsWanted
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import Chosen, PartContext, Report, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.sample.logprobs import token_logprobs

_MAX_LOGITS: Final = 1 << 20
"""Bound on the logits that are processed at a time, since the filters sort them."""
_BYTES_PER_LOGIT: Final = 64
"""Memory of the filters: copies in float32, their sort, and int64 weights with their sums."""


class FullLogprobsPart(StepPart):
    """Reports both log probabilities. Only rows that want them cost time."""

    request_extension = FullLogprobsWanted
    heaviest = FullLogprobsWanted()

    def __init__(self, context: PartContext) -> None:
        self._wants = np.zeros(context.num_rows, np.bool_)
        """[S]"""

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[FullLogprobsWanted | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            self._wants[request.slot] = wanted is not None

    def report(self, logits: Tensor, chosen: Chosen, rows: SampleRows) -> Report:
        wanted = np.flatnonzero(self._wants[rows.slots_np])
        return Report(FullLogprobs(), both_logprobs(logits, chosen, rows, wanted))

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count what one piece takes."""
        return min(num_rows * vocab_size, max(vocab_size, _MAX_LOGITS)) * _BYTES_PER_LOGIT


def both_logprobs(
    logits: Tensor, chosen: Chosen, rows: SampleRows, wanted: Int64s
) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the tokens of some samples, int64 [P], under the model, whose
    logits are [R, V], and as drawn: each float32 [R], 0 for other samples."""
    full = logits.new_zeros(logits.shape[0], dtype=torch.float32)
    drawn = torch.zeros_like(full)
    piece = max(1, _MAX_LOGITS // logits.shape[1])
    for start in range(0, wanted.size, piece):
        own = wanted[start : start + piece]
        places = upload(own, logits.device)
        full[places] = token_logprobs(logits[places], chosen.token_ids[places])
        drawn[places] = chosen.logprobs(rows.keep(own, rows.used), places)
    return full, drawn
