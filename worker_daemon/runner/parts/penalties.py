"""Penalties on tokens that a row already has: in its prompt and output (repetition), or only in its
output (presence, frequency).

A table on the device counts each row's tokens. It is built from a request's tokens when the request
is admitted, and updated with each token that the row gains. A sample at the position of a token
that the row has is penalized as if the row's tokens ended there, and one behind drafts as if they
were the row's tokens.

Shapes: S rows, R samples, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import MAX_TOKEN_COUNT, Penalties
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import Drafted, SampleRows

_FLOAT32: Final = 4
_INT16: Final = 2
_IN_PROMPT: Final = -(2**15)
"""Sign bit of a count: the token is in the prompt."""
_ONE_IN_PROMPT: Final = 1 << 32
"""Stands for an occurrence in the prompt, in counts of both."""
_MAX_ENTRIES: Final = 1 << 20
"""Bound on the entries of tables that are made for earlier positions of rows at a time."""
_ENTRY_BYTES: Final = 32
"""Memory of such an entry: counts in int64 and their copies, and the scores."""
_NONE: Final = Penalties()
_WITHOUT: Final = -1
"""In place of a row's number of prompt tokens: it has no penalties."""


class PenaltiesPart(StepPart):
    """Penalizes the logits of tokens that a row already has, in float32."""

    request_extension = Penalties
    heaviest = Penalties(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)
    follows_tokens = True

    def __init__(self, context: PartContext) -> None:
        self._sampling = context.sampling
        self._has_drafts = context.limits.max_drafts > 0
        self._tables = _tables(context) if context.is_last_stage else None
        self._num_prompt = np.full(context.num_rows, _WITHOUT, np.int32)
        """[S] host: tokens of the prompt, or _WITHOUT."""

    def uses(self, extension: Penalties) -> bool:
        return extension != _NONE

    def begin(
        self,
        requests: Sequence[NewRequestData],
        extensions: Sequence[Penalties | None],
        tokens: Sequence[Int32s],
    ) -> None:
        if self._tables is None:
            return
        seen, device = self._tables.seen, self._tables.seen.device
        slots = np.array([request.slot for request in requests], np.int64)
        weights = np.array([_weights(each or _NONE) for each in extensions], np.float32)
        self._tables.weights[upload(slots, device)] = upload(weights, device)
        self._num_prompt[slots] = _WITHOUT
        begun = [
            (request, own)
            for request, each, own in zip(requests, extensions, tokens, strict=True)
            if each is not None
        ]
        if not begun:
            return
        seen[upload(np.array([request.slot for request, _ in begun], np.int64), device)] = 0
        vocab_size = seen.shape[1]
        ends = [request.num_prompt_tokens for request, _ in begun]
        self._num_prompt[[request.slot for request, _ in begun]] = ends
        rows = [own + np.int64(request.slot * vocab_size) for request, own in begun]
        places, values = _entries(
            np.concatenate([row[:end] for row, end in zip(rows, ends, strict=True)]),
            np.concatenate([row[end:] for row, end in zip(rows, ends, strict=True)]),
        )
        seen.view(-1)[upload(places, device)] = upload(values, device)

    def gain(self, token_ids: Tensor, rows: SampleRows) -> None:
        assert self._tables is not None, "rows are sampled on the last stage"
        most = 1 if rows.drafted is None else 1 + _most_before(rows.drafted)
        self._sampling.count_tokens(rows.slots, token_ids, self._tables, most)

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        assert self._tables is not None, "rows are sampled on the last stage"
        drafts = None if rows.drafted is None else _drafts_before(rows.drafted)
        scores = self._sampling.penalized(logits, rows.slots, self._tables, drafts)
        if not rows.given:
            return scores
        earlier = rows.earlier
        earlier = earlier[self._num_prompt[rows.slots_np[earlier]] != _WITHOUT]
        piece = max(1, _MAX_ENTRIES // logits.shape[1])
        for start in range(0, earlier.size, piece):
            own = earlier[start : start + piece]
            places = upload(own, logits.device)
            weights = self._tables.weights[rows.slots[places].long()]
            tables = PenaltyTables(self._tables_at(rows, own, logits), weights)
            slots = torch.arange(own.size, dtype=torch.int32, device=logits.device)
            scores[places] = self._sampling.penalized(logits[places], slots, tables)
        return scores

    def _tables_at(self, rows: SampleRows, samples: Int64s, logits: Tensor) -> Tensor:
        """Return what the rows' tables would be if their tokens ended before each of these samples,
        int16 [n, V]. Those of a row are at neighboring positions."""
        shape = (samples.size, logits.shape[1])
        slots = rows.slots_np[samples]
        firsts = np.flatnonzero(np.diff(slots, prepend=-1))
        ends = np.append(firsts[1:], samples.size)
        places, weights = [], []
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            position = int(rows.positions_np[samples[first]])
            tokens = rows.given[samples[first]][: position + end - first - 1].astype(np.int64)
            order = np.arange(tokens.size)
            # A sample counts the tokens before its row's first sample here, or the one before it;
            # then the counts of all samples before it are added.
            places.append((first + np.maximum(0, order - position + 1)) * shape[1] + tokens)
            weights.append(np.where(order < self._num_prompt[slots[first]], _ONE_IN_PROMPT, 1))
        counts = torch.zeros(shape, dtype=torch.int64, device=logits.device)
        counts.view(-1).index_add_(
            0,
            upload(np.concatenate(places), logits.device),
            upload(np.concatenate(weights), logits.device),
        )
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True):
            counts[first:end] = counts[first:end].cumsum(0)
        generated = (counts & (_ONE_IN_PROMPT - 1)).clamp_(max=MAX_TOKEN_COUNT)
        return (generated + _IN_PROMPT * (counts >= _ONE_IN_PROMPT)).to(torch.int16)

    def launch_sampling(self, logits: Tensor, rows: SampleRows) -> None:
        column = rows.positions.long()
        if self._has_drafts:
            drafted = Drafted(np.ones_like(rows.slots_np), rows.positions, column)
            rows = rows._replace(drafted=drafted)
        self.adjust_logits(logits, rows, None)
        self.gain(column, rows)

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        return _INT16 * vocab_size + 3 * _FLOAT32

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and the tables of earlier positions. Kernels need no memory
        for drafts."""
        num_entries = min(num_rows * vocab_size, max(vocab_size, _MAX_ENTRIES))
        return num_rows * vocab_size * _FLOAT32 + num_entries * _ENTRY_BYTES


def _most_before(drafted: Drafted) -> int:
    return int(drafted.num_before_np.max(initial=0))


def _drafts_before(drafted: Drafted) -> DraftsBefore | None:
    most = _most_before(drafted)
    return DraftsBefore(drafted.num_before, drafted.inputs, most) if most else None


def _tables(context: PartContext) -> PenaltyTables:
    shape, device = (context.num_rows, context.limits.vocab_size), context.device
    weights = torch.tensor([_weights(_NONE)], dtype=torch.float32, device=device)
    return PenaltyTables(
        seen=torch.zeros(shape, dtype=torch.int16, device=device),
        weights=weights.repeat(context.num_rows, 1),
    )


def _weights(penalties: Penalties) -> tuple[float, float, float]:
    return (
        penalties.presence_penalty,
        penalties.frequency_penalty,
        penalties.repetition_penalty,
    )


def _entries(prompts: Int64s, outputs: Int64s) -> tuple[Int64s, NDArray[np.int16]]:
    """Return the places of all tokens, each once, and their values in the table. prompts, outputs:
    the places of tokens in prompts and of those that were generated. The time depends on the number
    of tokens, not on the size of the vocabulary."""
    generated, counts = np.unique(outputs, return_counts=True)
    places = np.union1d(prompts, generated)
    values = np.zeros(places.size, np.int16)
    values[np.searchsorted(places, generated)] = np.minimum(counts, MAX_TOKEN_COUNT)
    values[np.searchsorted(places, prompts)] |= np.int16(_IN_PROMPT)
    return places, values
