"""Adds a row's bias to the logit of its token, in the steps that name the row.

Shapes: S rows, R rows that sample, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rpc_schema.token_bias import BiasedRows, TokenBias
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.step import NewRequestData
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits, invalid


class TokenBiasPart(StepPart):
    """One biased token per row."""

    request_extension = TokenBias
    step_extension = BiasedRows

    def __init__(self, context: PartContext) -> None:
        self._token_ids = np.zeros(context.num_rows, np.int64)
        self._biases = np.zeros(context.num_rows, np.float32)

    def check(self, extension: TokenBias, request: NewRequestData, limits: StepLimits) -> None:
        if extension.token_id >= limits.vocab_size:
            field = f"scheduled_new_reqs[{request.req_id}].token_bias"
            raise invalid(field, extension.token_id, f"below {limits.vocab_size}")

    def check_step(
        self, extension: BiasedRows, frames: Sequence[Frame], limits: StepLimits
    ) -> NDArray[np.uint16]:
        if len(extension.slots) % 2:
            raise invalid("biased_rows.slots", len(extension.slots), "an even number of bytes")
        return np.frombuffer(extension.slots, "<u2")

    def uses(self, extension: TokenBias) -> bool:
        return False  # a step names the rows in which it counts

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[TokenBias | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            self._token_ids[request.slot] = 0 if wanted is None else wanted.token_id
            self._biases[request.slot] = 0.0 if wanted is None else wanted.bias

    def adjust_logits(
        self, logits: Tensor, rows: SampleRows, step_values: NDArray[np.uint16] | None
    ) -> Tensor:
        if step_values is None:
            return logits
        device, slots = logits.device, rows.slots_np
        named = np.flatnonzero(np.isin(slots, step_values))
        token_ids = upload(self._token_ids[slots[named]], device)
        biases = upload(self._biases[slots[named]], device).to(logits.dtype)
        return logits.index_put((upload(named, device), token_ids), biases, accumulate=True)
