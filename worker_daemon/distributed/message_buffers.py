"""Allocates the memory of one hop's messages. On NCCL it is registered with the communicator, so
that messages go directly from the sender's memory into the receiver's, without NCCL's own buffers.
"""

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor


class MessageBuffers:
    """`count` buffers of num_bytes uint8 each, initially zero, used in turn.

    They may outlive the communicator: an aborted one no longer refers to them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int, count: int, device: torch.device
    ) -> None:
        """group: of the two ranks; on CUDA it has its communicator already (link.py)."""

        def allocate() -> list[Tensor]:
            return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]

        # Kept as long as the buffers, whose memory it owns.
        self._pool: torch.cuda.MemPool | None = None
        if group is None or device.type != "cuda":
            self._buffers = allocate()
        else:
            # Typed as any backend; on CUDA link.py creates only NCCL's.
            backend = cast("dist.ProcessGroupNCCL", group._get_backend(device))
            self._pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(self._pool):
                self._buffers = allocate()
            backend.register_mem_pool(self._pool)
        self._next = 0

    def __len__(self) -> int:
        return len(self._buffers)

    def take(self) -> Tensor:
        """Return the buffer that was taken longest ago."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer
