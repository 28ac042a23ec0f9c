"""What paged attention reads of a step: the sequences, and where their keys lie.

Must not know layers, requests or kernels.
"""

from typing import Protocol

import torch


class PagedSequences(Protocol):
    """B sequences, whose query tokens lie one after the other; tensors are on the device."""

    @property
    def block_table(self) -> torch.Tensor:
        """[rows, max_blocks] int32, each row contiguous."""

    @property
    def seq_rows(self) -> torch.Tensor:
        """[>= B] int32: the row of the block table that each sequence has."""

    @property
    def query_start_loc(self) -> torch.Tensor:
        """[B + 1] int32, non-decreasing from 0: where each sequence's tokens start, and where the
        last one's end."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """[>= B] int32: keys of each sequence, its query tokens included."""

    @property
    def seq_order(self) -> torch.Tensor:
        """[>= B] int32, a permutation: the order in which decodes start. Longest first leaves the
        shortest tail."""

    @property
    def num_seqs(self) -> int:
        """B. Sequences without query tokens are allowed."""

    @property
    def max_query_len(self) -> int:
        """An upper bound of the query tokens of a sequence."""

    @property
    def max_seq_len(self) -> int:
        """An upper bound of seq_lens; serves to choose the number of splits."""
