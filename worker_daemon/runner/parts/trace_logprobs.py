"""Log probabilities of output tokens that a request brings, chunk by chunk, as if it had sampled
them.

All parts adjust the logits of each position as if the row's tokens ended there. The logits of a
chunk are computed a few positions at a time, as in prompt_logprobs.py.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import TraceLogprobs, TraceWanted
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.full_logprobs import both_logprobs
from worker_daemon.runner.parts.interface import PartContext, PositionLogits, Report, StepPart
from worker_daemon.runner.parts.token_spans import TokenSpan, spans_of
from worker_daemon.runner.sample_rows import replayed_rows
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits, invalid

_MAX_LOGITS: Final = 1 << 25
"""Bound on the logits that are computed at a time."""
_NO_TOKENS: Final = np.zeros(0, np.int32)


class TraceLogprobsPart(StepPart):
    """Reports both log probabilities of given tokens. Needs no memory beyond that of a step that
    samples as many positions."""

    request_extension = TraceWanted
    follows_tokens = True
    reports_forward = True

    def __init__(self, context: PartContext) -> None:
        self._req_ids = [""] * context.num_rows
        self._traces: list[Int32s] = [_NO_TOKENS] * context.num_rows
        """Each row's tokens up to the last that its request has brought; empty without any."""
        self._firsts = [0] * context.num_rows
        """Position of each row's first output token."""
        limits = context.limits
        self._piece = max(1, min(limits.max_num_seqs, _MAX_LOGITS // limits.vocab_size))
        """Positions whose logits are computed at a time."""

    def check(self, extension: TraceWanted, request: NewRequestData, limits: StepLimits) -> None:
        field = f"scheduled_new_reqs[{request.req_id}].trace"
        most = request.num_tokens - request.num_prompt_tokens
        if extension.num_tokens > most:
            fix = f"at most {most}, the output tokens of the admission"
            raise invalid(f"{field}.num_tokens", extension.num_tokens, fix)
        if extension.last_token_id >= limits.vocab_size:
            fix = f"below {limits.vocab_size}"
            raise invalid(f"{field}.last_token_id", extension.last_token_id, fix)

    def uses(self, extension: TraceWanted) -> bool:
        """Return False: the part does nothing when rows are sampled."""
        return False

    def begin(
        self,
        requests: Sequence[NewRequestData],
        extensions: Sequence[TraceWanted | None],
        tokens: Sequence[Int32s],
    ) -> None:
        for request, wanted, own in zip(requests, extensions, tokens, strict=True):
            trace = _NO_TOKENS
            if wanted is not None:
                trace = own[: request.num_prompt_tokens + wanted.num_tokens]
                if wanted.last_token_id >= 0:
                    trace = np.append(trace, np.int32(wanted.last_token_id))
            self._traces[request.slot] = trace
            self._firsts[request.slot] = request.num_prompt_tokens
            self._req_ids[request.slot] = request.req_id

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, positions: PositionLogits
    ) -> Report | None:
        spans = list(spans_of(step, self._traces, self._firsts))
        if not spans:
            return None
        found = [self._logprobs(hidden, span, positions) for span in spans]
        extension = TraceLogprobs(
            req_ids=tuple(self._req_ids[span.slot] for span in spans),
            spans=np.array([(each.first, each.targets.size) for each in spans], "<i4").tobytes(),
        )
        full, drawn = (torch.cat(each) for each in zip(*found, strict=True))
        return Report(extension, (full, drawn), per_row=False)

    def _logprobs(
        self, hidden: Tensor, span: TokenSpan, positions: PositionLogits
    ) -> tuple[Tensor, Tensor]:
        """Return both log probabilities of a span's tokens."""
        full, drawn = [], []
        for start in range(0, span.targets.size, self._piece):
            own = slice(start, start + self._piece)
            targets = upload(span.targets[own].astype(np.int64), hidden.device)
            logits = positions.compute(hidden[upload(span.tokens[own], hidden.device)])
            first, trace = span.first + start, self._traces[span.slot]
            rows = replayed_rows(span.slot, first, targets.shape[0], trace, hidden.device)
            chosen = positions.replay(logits, targets, rows)
            both = both_logprobs(logits, chosen, rows, np.arange(targets.shape[0]))
            full.append(both[0])
            drawn.append(both[1])
        return torch.cat(full), torch.cat(drawn)
