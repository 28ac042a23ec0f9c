"""Suffix lookup: a row's drafts are the tokens that most often followed its last ones, in its own
prompt and output and in the output of other requests, earlier ones and those that still run.

All that is searched lies in plain tokens and is compared with each row's last ones: that costs less
than a walk down a tree, whose nodes would be read one after the other. The default 262,144 kept
tokens are 1 MB and stay in an H100's L2: 64 rows read 64 MB a step from there, some 12 us.
kernels/suffix_lookup.py has more. Places whose pages are overwritten are forgotten.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from rpc_schema.config import SpeculativeConfig
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.drafting import PAGE_TOKENS, KeptTable, Matching, TextKernels
from worker_daemon.device.pinned import upload
from worker_daemon.drafting.interface import ComputedStep, Gained
from worker_daemon.drafting.row_texts import DraftLimits, RowTexts

_MOST_REQUESTS: Final = 2**31 - 2
"""Numbers of requests begin again after it; the pages of the first ones are long gone then."""
_PAGE_BYTES: Final = PAGE_TOKENS * 4 + 4 + 2 * 8
_ROW_BYTES: Final = 8 + 3 * 4
_CLOCK_BYTES: Final = 8


class SuffixDrafter:
    """The drafter of the method suffix. Owns the texts of its rows and the kept output, on the
    device."""

    def __init__(
        self,
        config: SpeculativeConfig,
        limits: DraftLimits,
        device: torch.device,
        kernels: TextKernels,
    ) -> None:
        self._kernels = kernels
        self._texts = RowTexts(limits, device, kernels)
        self._matching = Matching(
            config.prompt_lookup_max, config.prompt_lookup_min, limits.num_drafts
        )
        self._kept = _empty_table(_num_pages(config), limits.max_num_seqs + 1, device)
        self._num_begun = 0

    @property
    def follower(self) -> None:
        """See Drafter."""
        return None

    @property
    def texts(self) -> Tensor:
        """See Drafter."""
        return self._texts.table.tokens

    @staticmethod
    def num_bytes(config: SpeculativeConfig, limits: DraftLimits) -> int:
        """Return the device memory that a drafter takes."""
        rows = (limits.max_num_seqs + 1) * _ROW_BYTES
        return RowTexts.num_bytes(limits) + rows + _num_pages(config) * _PAGE_BYTES + _CLOCK_BYTES

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter. Only what a request gains from now on is kept for others."""
        if not slots:
            return
        self._texts.begin(slots, tokens)
        numbers = 1 + (self._num_begun + np.arange(len(slots))) % _MOST_REQUESTS
        self._num_begun += len(slots)
        lengths = [text.size for text in tokens]
        header = upload(np.array([slots, numbers, lengths], np.int64), self._kept.requests.device)
        self._kept.requests[header[0]] = header[1].int()
        self._kept.ends[header[0]] = header[2].int()
        self._kept.writing.index_fill_(0, header[0], -1)

    def follow(self, step: ComputedStep) -> None:
        """See Drafter. Only plain decodes keep what they read. A step after which drafts are made
        keeps what it gains, and either keeps what other steps have put off. So what a request gains
        last is missed if no drafts were made then."""
        metadata = step.metadata
        if metadata.max_query_len == 1:
            table, rows = self._texts.table, metadata.seq_rows
            self._kernels.keep(table, self._kept, rows, metadata.seq_lens)

    def propose(self, gained: Gained) -> Tensor:
        """See Drafter."""
        self._texts.gain(gained)
        self._kernels.keep(self._texts.table, self._kept, gained.rows)
        return self._kernels.vote(self._texts.table, self._kept, gained.rows, self._matching)

    def forget(self) -> None:
        """See Drafter. The kept output stays."""
        self._texts.forget()
        self._kept.requests.zero_()

    def restart(self) -> None:
        """See Drafter. Pages from the clock's start on are empty, whatever they hold."""
        self.forget()
        self._texts.restart()
        self._kept.clock.zero_()
        self._num_begun = 0

    def compile_subset(self) -> "SuffixDrafter":
        """See Drafter."""
        return self


def _num_pages(config: SpeculativeConfig) -> int:
    return config.max_kept_tokens // PAGE_TOKENS


def _empty_table(num_pages: int, num_rows: int, device: torch.device) -> KeptTable:
    def filled(value: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return KeptTable(
        tokens=filled(-1, torch.int32, num_pages, PAGE_TOKENS),
        owners=filled(0, torch.int32, num_pages),
        before=filled(-1, torch.int64, num_pages),
        after=filled(-1, torch.int64, num_pages),
        clock=filled(0, torch.int64, 1),
        writing=filled(-1, torch.int64, num_rows),
        filled=filled(0, torch.int32, num_rows),
        ends=filled(0, torch.int32, num_rows),
        requests=filled(0, torch.int32, num_rows),
    )
