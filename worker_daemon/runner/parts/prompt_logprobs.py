"""Log probabilities of a prompt's tokens, chunk by chunk. Each comes from the logits of the token
before.

The logits of a chunk are computed a few positions at a time, at most as many as a step may sample.
So they take no more memory than the memory profile has measured.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import (
    MAX_PROMPT_LOGPROBS_TOKENS,
    PromptLogprobs,
    PromptLogprobsWanted,
)
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, PositionLogits, Report, StepPart
from worker_daemon.runner.parts.token_spans import spans_of
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits, invalid
from worker_daemon.sample.logprobs import gather_logprobs

_MAX_LOGITS: Final = 1 << 25
"""Bound on the logits that are computed at a time."""
_NO_TOKENS: Final = np.zeros(0, np.int32)


class PromptLogprobsPart(StepPart):
    """Reports log probabilities of prompt tokens. All positions of a step report as many as the
    request that wants the most."""

    request_extension = PromptLogprobsWanted
    follows_tokens = True
    reports_forward = True

    def __init__(self, context: PartContext) -> None:
        num_rows = context.num_rows
        self._req_ids = [""] * num_rows
        self._prompts: list[Int32s] = [_NO_TOKENS] * num_rows
        """Each row's prompt; empty if its request wants no log probabilities of it."""
        self._firsts = [1] * num_rows
        self._widths = np.zeros(num_rows, np.int32)
        vocab_size = context.limits.vocab_size
        self._piece = max(1, min(context.limits.max_num_seqs, _MAX_LOGITS // vocab_size))
        """Positions whose logits are computed at a time."""

    def check(
        self, extension: PromptLogprobsWanted, request: NewRequestData, limits: StepLimits
    ) -> None:
        field = f"scheduled_new_reqs[{request.req_id}].prompt_logprobs"
        if extension.count > limits.vocab_size:
            raise invalid(field, extension.count, f"at most {limits.vocab_size}")
        if limits.max_num_batched_tokens > MAX_PROMPT_LOGPROBS_TOKENS:
            fix = f"load with max_num_batched_tokens of at most {MAX_PROMPT_LOGPROBS_TOKENS}"
            raise invalid(field, extension.count, fix)

    def uses(self, extension: PromptLogprobsWanted) -> bool:
        """Return False: the part does nothing when rows are sampled."""
        return False

    def begin(
        self,
        requests: Sequence[NewRequestData],
        extensions: Sequence[PromptLogprobsWanted | None],
        tokens: Sequence[Int32s],
    ) -> None:
        for request, wanted, own in zip(requests, extensions, tokens, strict=True):
            prompt = _NO_TOKENS if wanted is None else own[: request.num_prompt_tokens]
            self._prompts[request.slot] = prompt
            self._req_ids[request.slot] = request.req_id
            self._widths[request.slot] = 0 if wanted is None else wanted.count

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, positions: PositionLogits
    ) -> Report | None:
        chunks = list(spans_of(step, self._prompts, self._firsts))
        if not chunks:
            return None
        slots, firsts, tokens, targets = zip(*chunks, strict=True)
        width, device = int(self._widths[list(slots)].max()), hidden.device
        places = torch.split(upload(np.concatenate(tokens), device), self._piece)
        wanted = torch.split(upload(np.concatenate(targets).astype(np.int64), device), self._piece)
        found = [
            gather_logprobs(positions.compute(hidden[own]).float(), each, width)
            for own, each in zip(places, wanted, strict=True)
        ]
        spans = np.array([firsts, list(map(len, targets))], "<i4").T
        extension = PromptLogprobs(
            width=width,
            req_ids=tuple(self._req_ids[slot] for slot in slots),
            spans=spans.tobytes(),
        )
        columns = (
            torch.cat([each.token_ids for each in found]),
            torch.cat([each.logprobs for each in found]),
            torch.cat([each.ranks for each in found]),
        )
        return Report(extension, columns, per_row=False)
