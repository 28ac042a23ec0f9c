"""The tokens of the request rows on the device, by position. A row has those with which its request
came, and then those that steps read: each step writes its own, as it writes their KV."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.drafting import Matching, TextKernels, TextTable
from worker_daemon.device.pinned import upload
from worker_daemon.drafting.interface import Gained

_TOKEN_BYTES = 4
_ROW_BYTES = 4 + 2 * 8
"""A row's length and scratch."""


class DraftLimits(NamedTuple):
    """Bounds of the requests that a drafter follows."""

    max_num_seqs: int
    max_model_len: int
    num_drafts: int
    """num_speculative_tokens"""

    @property
    def width(self) -> int:
        """Most tokens of a row: the step that reaches max_model_len may go beyond it."""
        return self.max_model_len + self.num_drafts + 1


class RowTexts:
    """Owns one text for each request row and the spare row. Step thread only."""

    def __init__(self, limits: DraftLimits, device: torch.device, kernels: TextKernels) -> None:
        num_rows = limits.max_num_seqs + 1
        self._kernels = kernels
        self.table = TextTable(
            torch.zeros((num_rows, limits.width), dtype=torch.int32, device=device),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
            torch.zeros((2, num_rows), dtype=torch.int64, device=device),
        )

    @staticmethod
    def num_bytes(limits: DraftLimits) -> int:
        """Return the device memory that an object takes."""
        return (limits.max_num_seqs + 1) * (limits.width * _TOKEN_BYTES + _ROW_BYTES)

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter.begin. All texts travel in one copy."""
        if not slots:
            return
        lengths = [text.size for text in tokens]
        assert max(lengths) <= self.table.tokens.shape[1]
        bounds = np.cumsum([0, *lengths], dtype=np.int32)
        header = np.array(slots, np.int32)
        columns = upload(np.concatenate([header, bounds, *tokens]), self.table.tokens.device)
        sizes = [header.size, bounds.size, int(bounds[-1])]
        rows, cuts, flat = torch.split(columns, sizes)
        self._kernels.place(self.table, rows, cuts, flat)

    def gain(self, gained: Gained) -> None:
        """Append what the rows have gained, which no step has read yet."""
        self._kernels.append(self.table, *gained[:4])

    def continuations(self, rows: Tensor, matching: Matching) -> Tensor:
        """Return int64 [Q, K] for rows int32 [Q]: see TextKernels.continue_texts."""
        return self._kernels.continue_texts(self.table, rows, matching)

    def forget(self) -> None:
        """Empty all rows, until they begin."""
        self.table.lengths.zero_()

    def restart(self) -> None:
        """Empty all rows, also those that go on without another beginning."""
        self.forget()
        self.table.tokens.zero_()
