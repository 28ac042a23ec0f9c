"""BlockKernels by torch, for devices without Triton and as a reference."""

import torch
from torch import Tensor

from worker_daemon.contracts.block_kernels import PageShape


class TorchBlockKernels:
    """See BlockKernels."""

    def gather(self, pages: Tensor, block_ids: Tensor, rows: Tensor) -> None:
        """See BlockKernels."""
        own = rows.view(-1, *pages.shape[1:])
        torch.index_select(pages, 0, block_ids, out=own)

    def scatter(self, rows: Tensor, block_ids: Tensor, pages: Tensor) -> None:
        """See BlockKernels."""
        pages.index_copy_(0, block_ids.long(), rows.view(-1, *pages.shape[1:]))

    def fill(self, pages: Tensor, block_ids: Tensor, are_meant: Tensor, word: int) -> None:
        """See BlockKernels."""
        pages.index_fill_(0, block_ids.long()[are_meant], word)

    def sum_parts(
        self,
        rows: Tensor,
        keys: Tensor,
        shape: PageShape,
        sums: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """See BlockKernels."""
        products = rows.view(len(rows), -1, keys.numel()) * keys
        by_part = products.view(len(rows), -1, shape.rows, shape.num_parts, shape.words)
        sums.copy_(by_part.sum(dim=(2, 4)).flatten(1))
        if stored is not None:
            sums -= stored.contiguous().view(torch.int64)

    def deliver(
        self,
        rows: Tensor,
        block_ids: Tensor,
        pages: Tensor,
        keys: Tensor,
        shape: PageShape,
        sums: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """See BlockKernels."""
        self.scatter(rows, block_ids, pages)
        self.sum_parts(rows, keys, shape, sums, stored)
