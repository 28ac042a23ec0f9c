"""Sequences of tokens that a row must not complete: the last token of each is banned when the
tokens before it are the row's newest.

The sequences are stored on the device when a request is admitted. So are each row's newest tokens,
which are updated with each token that the row samples.

Shapes: S rows, R samples, V vocabulary, W sequences of a row, L tokens before the last.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.step import NewRequestData
from rpc_schema.token_rules import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, BadWords
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_INT32: Final = 4
_INT64: Final = 8
_BEFORE: Final = MAX_BAD_WORD_TOKENS - 1
_ANY: Final = -1
"""Entry that any token matches: the sequence is shorter."""
_NEVER: Final = -2
"""Entry that no token matches: the row has no such sequence."""
_NO_TOKEN: Final = -3
"""Filler in the newest tokens of a row that has fewer than L tokens."""


class BadWordsPart(StepPart):
    """Sets the logits of tokens that would complete a bad word to -inf."""

    request_extension = BadWords
    heaviest = BadWords.of(((0,),))
    follows_tokens = True

    def __init__(self, context: PartContext) -> None:
        self._samples = context.is_last_stage
        num_rows = context.num_rows if self._samples else 0
        device = context.device
        shape = (num_rows, MAX_BAD_WORDS, _BEFORE)
        self._before = torch.full(shape, _NEVER, dtype=torch.int32, device=device)
        """[S, W, L] the tokens before the last, right-aligned."""
        self._last = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        """[S, W]"""
        self._newest = torch.full((num_rows, _BEFORE), _NO_TOKEN, dtype=torch.int32, device=device)
        """[S, L], right-aligned."""
        self._counts = np.zeros(context.num_rows, np.int32)
        """[S] host"""

    def check(self, extension: BadWords, request: NewRequestData, limits: StepLimits) -> None:
        refuse_fault(extension.find_fault(limits.vocab_size), request)

    def uses(self, extension: BadWords) -> bool:
        return bool(extension.lengths)

    def begin(
        self,
        requests: Sequence[NewRequestData],
        extensions: Sequence[BadWords | None],
        tokens: Sequence[Int32s],
    ) -> None:
        if not self._samples:
            return
        count = len(requests)
        before = np.full((count, MAX_BAD_WORDS, _BEFORE), _NEVER, np.int32)
        last = np.zeros((count, MAX_BAD_WORDS), np.int64)
        newest = np.full((count, _BEFORE), _NO_TOKEN, np.int32)
        for index, (request, own) in enumerate(zip(requests, extensions, strict=True)):
            words = () if own is None else own.words
            self._counts[request.slot] = len(words)
            for place, word in enumerate(words):
                before[index, place] = _ANY
                before[index, place, _BEFORE + 1 - len(word) :] = word[:-1]
                last[index, place] = word[-1]
            _fill_recent(newest[index], tokens[index])
        device = self._last.device
        slots = upload(np.array([request.slot for request in requests], np.int64), device)
        self._before[slots] = upload(before, device)
        self._last[slots] = upload(last, device)
        self._newest[slots] = upload(newest, device)

    def gain(self, token_ids: Tensor, rows: SampleRows) -> None:
        slots = rows.slots.long()
        newest = self._newest[slots]
        if rows.drafted is not None:
            is_gained = (token_ids >= 0).long()
            counts = is_gained.new_zeros(self._newest.shape[0]).index_add_(0, slots, is_gained)
            firsts = torch.arange(slots.shape[0], device=slots.device) - rows.drafted.num_before
            # All samples of a row write the same.
            self._newest[slots] = _appended(newest, token_ids, firsts, counts[slots])
            return
        gained = token_ids.to(torch.int32).unsqueeze(1)
        longer = torch.cat((newest[:, 1:], gained), dim=1)
        self._newest[slots] = torch.where(gained < 0, newest, longer)

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: None) -> Tensor:
        width, slots = int(self._counts[rows.slots_np].max(initial=0)), rows.slots.long()
        before, last = self._before[slots, :width], self._last[slots, :width]
        agrees = (before == self._recent(rows).unsqueeze(1)) | (before == _ANY)
        most = logits.new_full((), torch.inf)
        bound = torch.where(agrees.all(dim=2), -most, most)
        # If two sequences have the same last token, the lower bound applies.
        return logits.clone().scatter_reduce_(1, last, bound, "amin")

    def _recent(self, rows: SampleRows) -> Tensor:
        """Return the tokens before each sample, int32 [R, L]: of those that are not their rows'
        newest, of the tokens of the admission; with the drafts before it."""
        recent = self._newest[rows.slots.long()]
        if rows.drafted is not None:
            num_before, inputs = rows.drafted.num_before, rows.drafted.inputs
            ends = torch.arange(1, inputs.shape[0] + 1, device=inputs.device)
            return _appended(recent, inputs, ends - num_before, num_before)
        if not rows.given:
            return recent
        earlier = rows.earlier
        own = np.full((earlier.size, _BEFORE), _NO_TOKEN, np.int32)
        for entry, sample in zip(own, earlier, strict=True):
            _fill_recent(entry, rows.given[sample][: rows.positions_np[sample]])
        recent[upload(earlier, recent.device)] = upload(own, recent.device)
        return recent

    @staticmethod
    def sampling_row_bytes(vocab_size: int) -> int:
        return _INT32 * (MAX_BAD_WORDS + 1) * _BEFORE + _INT64 * MAX_BAD_WORDS

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and of the rows' sequences with their comparisons. What
        drafts need is freed before these."""
        words = MAX_BAD_WORDS * (_BEFORE * (_INT32 + 3) + _INT64 + itemsize)
        return num_rows * (vocab_size * itemsize + words)


def _fill_recent(recent: Int32s, tokens: Int32s) -> None:
    """Fill the last tokens, right-aligned, into an entry [L]."""
    last = tokens[-_BEFORE:]
    recent[_BEFORE - last.size :] = last


def _appended(recent: Tensor, token_ids: Tensor, firsts: Tensor, counts: Tensor) -> Tensor:
    """Return the last tokens, int32 [R, L], of each entry, int32 [R, L], and behind it the tokens
    from firsts [R] to firsts + counts [R] of token_ids, int64 [n]."""
    width = recent.shape[1]
    offsets = torch.arange(width, device=recent.device) + counts.unsqueeze(1)
    own = recent.gather(1, offsets.clamp(max=width - 1))
    places = (firsts.unsqueeze(1) + (offsets - width)).clamp_(0, token_ids.shape[0] - 1)
    return torch.where(offsets < width, own, token_ids[places].to(torch.int32))
