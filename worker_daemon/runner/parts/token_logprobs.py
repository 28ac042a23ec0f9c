"""Reports log probabilities of sampled tokens and of the most likely ones.

They come from the logits after grammar masks and before everything else that changes them: allowed
tokens, bad words, biases, logits processors, bans of stop tokens, penalties, temperature, filters.

Shapes: S rows, R rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rpc_schema.sampling import LogprobsWanted, TokenLogprobs
from rpc_schema.step import NewRequestData
from worker_daemon.runner.parts.interface import Chosen, PartContext, Report, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits, invalid
from worker_daemon.sample.logprobs import gather_logprobs

_FLOAT32 = 4
_INT32 = 4


class TokenLogprobsPart(StepPart):
    """Reports log probabilities. All rows of a step report as many as the row that wants the
    most."""

    request_extension = LogprobsWanted
    heaviest = LogprobsWanted(count=1)

    def __init__(self, context: PartContext) -> None:
        self._counts = np.zeros(context.num_rows, np.int32)
        """[S] how many of the most likely tokens each row reports; 0 for the sampled token alone,
        and for rows that report nothing."""

    def check(self, extension: LogprobsWanted, request: NewRequestData, limits: StepLimits) -> None:
        if extension.count > limits.vocab_size:
            field = f"scheduled_new_reqs[{request.req_id}].logprobs"
            raise invalid(field, extension.count, f"at most {limits.vocab_size}")

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[LogprobsWanted | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            self._counts[request.slot] = 0 if wanted is None else wanted.count

    def report(self, logits: Tensor, chosen: Chosen, rows: SampleRows) -> Report:
        width = int(self._counts[rows.slots_np].max(initial=0))
        found = gather_logprobs(logits.float(), chosen.token_ids, width)
        return Report(TokenLogprobs(width=width), (found.token_ids, found.logprobs, found.ranks))

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a float32 copy of the logits if their dtype is another, the log-softmax, and for
        the ranks the boolean mask and its int32 copy."""
        num_logits = num_rows * vocab_size
        copy = 0 if itemsize == _FLOAT32 else num_logits * _FLOAT32
        return copy + num_logits * (_FLOAT32 + 1 + _INT32)
