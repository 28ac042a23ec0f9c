"""Bans stop tokens in rows that are below their min_tokens. The driver ends requests.

Shapes: S rows, R rows that sample, V vocabulary, K banned (row, token) pairs.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpc_schema.sampling import MAX_STOP_TOKEN_IDS, StopTokens
from rpc_schema.step import NewRequestData
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits, invalid


class StopTokensPart(StepPart):
    """Prevents a row from sampling a stop token before its min_tokens."""

    request_extension = StopTokens
    heaviest = StopTokens(token_ids=(0,), min_tokens=1)

    def __init__(self, context: PartContext) -> None:
        self._first = np.zeros(context.num_rows, np.int32)
        """[S] the first position at which a stop token may be sampled; 0 without min_tokens."""
        self._token_ids: list[tuple[int, ...]] = [()] * context.num_rows

    def check(self, extension: StopTokens, request: NewRequestData, limits: StepLimits) -> None:
        field = f"scheduled_new_reqs[{request.req_id}].stop_token_ids"
        token_ids = extension.token_ids
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise invalid(field, f"{len(token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS}")
        unknown = [token for token in token_ids if token >= limits.vocab_size]
        if unknown:
            raise invalid(field, unknown[0], f"below {limits.vocab_size}")

    def uses(self, extension: StopTokens) -> bool:
        return bool(extension.min_tokens and extension.token_ids)

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[StopTokens | None]
    ) -> None:
        for request, stops in zip(requests, extensions, strict=True):
            first = 0
            if stops is not None and self.uses(stops):
                first = request.num_prompt_tokens + stops.min_tokens
            self._first[request.slot] = min(first, np.iinfo(np.int32).max)
            self._token_ids[request.slot] = stops.token_ids if stops is not None else ()

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        first = self._first[rows.slots_np]
        # If tokens may be refused, as drafts are, the host's positions are upper bounds. The device
        # then decides for every row with min_tokens. Else a sample behind drafts has the position
        # that it has if they are accepted: otherwise it is not gained.
        may_be_below = (first > 0) if rows.are_bounds else rows.positions_np < first
        below = np.flatnonzero(may_be_below)
        if not below.size:
            return logits
        banned = [self._token_ids[slot] for slot in rows.slots_np[below].tolist()]
        ban_rows, ban_token_ids = ban_pairs(below.tolist(), banned)
        device = logits.device
        allowed = logits.clone()
        places = upload(ban_rows, device), upload(ban_token_ids, device)
        left = logits.new_full((), -torch.inf)  # a plain scalar would synchronize
        if rows.are_bounds:
            is_below = rows.positions[places[0]] < upload(first[ban_rows], device)
            left = torch.where(is_below, left, logits[places])
        allowed.index_put_(places, left)
        return allowed

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits."""
        return num_rows * vocab_size * itemsize


def ban_pairs(
    rows: Sequence[int], token_ids: Sequence[Sequence[int]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return rows and token ids, each [K]: one pair per row and banned token."""
    pairs = [(row, token) for row, own in zip(rows, token_ids, strict=True) for token in own]
    ban_rows, ban_token_ids = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return ban_rows.copy(), ban_token_ids.copy()
