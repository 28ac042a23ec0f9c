"""Looks drafts up in plain torch, for the CPU and as the reference of the Triton kernels
(kernels/text_lookup.py). TextKernels (contracts/drafting.py) defines shapes and meaning.

It reads lengths on the host, so that short texts cost little; on a CUDA device it would wait.
"""

import torch
from torch import Tensor

from worker_daemon.contracts.drafting import KeptTable, Matching, TextTable
from worker_daemon.drafting.torch_votes import keep_tokens, matched_before, vote


class TorchTextKernels:
    """Stateless."""

    def place(self, table: TextTable, rows: Tensor, bounds: Tensor, tokens: Tensor) -> None:
        starts, ends = bounds[:-1].long(), bounds[1:].long()
        counts = ends - starts
        places = torch.arange(tokens.shape[0], device=tokens.device)
        owners = torch.repeat_interleave(rows.long(), counts)
        table.tokens[owners, places - torch.repeat_interleave(starts, counts)] = tokens
        table.lengths[rows.long()] = counts.int()

    def append(
        self, table: TextTable, rows: Tensor, token_ids: Tensor, counts: Tensor, lengths: Tensor
    ) -> None:
        rows = rows.long()
        lengths = (lengths - counts).clamp(max=table.tokens.shape[1])
        gained = torch.where(token_ids[:, 0] < 0, 0, counts)
        gained = torch.minimum(gained, table.tokens.shape[1] - lengths)
        columns = torch.arange(token_ids.shape[1], device=rows.device)
        sequence, column = torch.nonzero(columns < gained[:, None], as_tuple=True)
        places = lengths[sequence] + column
        table.tokens[rows[sequence], places] = token_ids[sequence, column].int()
        table.lengths[rows] = lengths + gained

    def continue_texts(self, table: TextTable, rows: Tensor, matching: Matching) -> Tensor:
        lengths = table.lengths[rows.long()].long()
        width = int(lengths.max()) if rows.shape[0] else 0
        texts = table.tokens[rows.long(), :width]
        matched = matched_before(texts, lengths, matching.longest)
        places = torch.arange(width, device=rows.device)
        is_match = matched >= matching.shortest
        scores = torch.where(is_match, matched * (width + 1) + places, 0)
        best = scores.amax(1) if width else torch.zeros_like(lengths)
        ends = best % (width + 1)
        ahead = torch.arange(matching.num_drafts, device=rows.device)
        periods = (lengths - ends).clamp(min=1)[:, None]
        followers = ends[:, None] + ahead % periods
        if not width:
            return torch.zeros(followers.shape, dtype=torch.int64, device=rows.device)
        drafts = texts.gather(1, followers.clamp(max=width - 1)).long()
        return torch.where(best[:, None] > 0, drafts, 0)

    def keep(
        self, table: TextTable, kept: KeptTable, rows: Tensor, ends: Tensor | None = None
    ) -> None:
        keep_tokens(table, kept, rows, table.lengths[rows.long()] if ends is None else ends)

    def vote(self, table: TextTable, kept: KeptTable, rows: Tensor, matching: Matching) -> Tensor:
        return vote(table, kept, rows, matching)
