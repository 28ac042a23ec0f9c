"""Sends activations between neighboring pipeline stages: receives are posted early, sends do not
block, and messages carry no metadata.

Shapes: N tokens, H hidden size. Both ends know N from the step message. With tensor parallelism
each rank sends its 1/tp of the [N, H] residual stream, and the receiving stage gathers the whole. A
message ends in a trailer of one int64: its status in the low bits, and above that its identity
(link, seq, a hash of shape and dtype). The receiver checks the identity on the device. A failed
rank still sends, so that no other rank hangs, and its status reaches the last stage.
"""

import zlib
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from worker_daemon.distributed.link import Link
from worker_daemon.distributed.tp import TensorParallel, communication

STATUS_OK = 0
STATUS_FAILED = 1
"""An earlier stage failed in this step; the activations are invalid."""
STATUS_MISMATCH = 2
"""The neighbor sent another step than expected, or another shape or dtype."""

_TRAILER_BYTES = 16
"""Bytes of the trailer, one int64, and its alignment."""
_STATUS_BITS = 2
_SHAPE_BITS, _SEQ_BITS, _LINK_BITS = 16, 32, 12
"""Bits of the trailer's fields, from the status up: fewer than 63 in total, so that it is never
negative. Higher bits of seq and link are cut off; no message is old enough for these values to
repeat."""
_TAG_RANGE = 1 << 30


class HopShape(NamedTuple):
    """Sizes on which both ends of a hop agree."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    max_num_tokens: int
    """Tokens of the largest step."""
    depth: int
    """Number of steps in flight, plus the one being built."""


class _Layout:
    """The layout of a message for any number of tokens: hidden states, then the trailer."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, tp: TensorParallel) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.tp = tp
        self.num_slices = tp.size if hidden_size % tp.size == 0 else 1
        self._hash = zlib.crc32(f"{hidden_size} {dtype} {self.num_slices}".encode())

    def shape_hash(self, num_tokens: int) -> int:
        """Return the hash of shape and dtype for that many tokens. Neighbors whose models differ by
        mistake (float16 and bfloat16, say) may send the expected number of bytes."""
        return (self._hash + num_tokens) % (1 << _SHAPE_BITS)

    def slice_numel(self, num_tokens: int) -> int:
        """Return the elements of [N, H] that one rank sends."""
        return num_tokens * self.hidden_size // self.num_slices

    def trailer_start(self, num_tokens: int) -> int:
        """Return the byte offset of the trailer, aligned to its size."""
        size = self.slice_numel(num_tokens) * self.dtype.itemsize
        return -(-size // _TRAILER_BYTES) * _TRAILER_BYTES

    def message_bytes(self, num_tokens: int) -> int:
        return self.trailer_start(num_tokens) + _TRAILER_BYTES

    def slice_of(self, message: Tensor, num_tokens: int) -> Tensor:
        """Return a view of a message's activations: [slice_numel]."""
        size = self.slice_numel(num_tokens) * self.dtype.itemsize
        return message[:size].view(self.dtype)

    def trailer_of(self, message: Tensor, num_tokens: int) -> Tensor:
        """Return a view of a message's trailer: int64 []."""
        start = self.trailer_start(num_tokens)
        return message[start : start + _TRAILER_BYTES].view(torch.int64)[0]


def _identity(generation: int, seq: int, shape_hash: int) -> int:
    """Return the trailer of a step with status 0."""
    link = generation % (1 << _LINK_BITS)
    step = link << _SEQ_BITS | seq % (1 << _SEQ_BITS)
    return (step << _SHAPE_BITS | shape_hash) << _STATUS_BITS


class _MessageBuffers:
    """`count` buffers of num_bytes uint8 each, zero at first, used in rotation for one hop's
    messages. With NCCL they are registered with the communicator, so messages go directly from the
    sender's memory to the receiver's, without NCCL's buffers.

    They may outlive the communicator: an aborted one drops its registrations.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int, count: int, device: torch.device
    ) -> None:
        """group: the two ranks; on CUDA its communicator exists already (link.py)."""

        def allocate() -> list[Tensor]:
            return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]

        # Keep the pool as long as the buffers, which use its memory.
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
        """Return the least recently used buffer."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        return buffer


class StageInbound:
    """Receives into `depth` rotating buffers, one per step in flight. Used on the step thread
    only."""

    def __init__(self, link: Link, tp: TensorParallel, hop: HopShape) -> None:
        self._group = link.groups.from_previous
        self._generation = link.generation
        self._layout = _Layout(hop.hidden_size, hop.dtype, tp)
        size = self._layout.message_bytes(hop.max_num_tokens)
        self._buffers = _MessageBuffers(self._group, size, hop.depth, hop.device)

    def post(self, num_tokens: int, seq: int) -> "StageArrival":
        """Start to receive the activations of step seq."""
        message = self._buffers.take()[: self._layout.message_bytes(num_tokens)]
        tag = seq % _TAG_RANGE
        with communication("receiving from the previous stage"):
            work = dist.irecv(message, group=self._group, group_src=0, tag=tag)
        assert work is not None, "this rank is in the group"
        expected = _identity(self._generation, seq, self._layout.shape_hash(num_tokens))
        return StageArrival(message, work, self._layout, num_tokens, expected)


@dataclass(slots=True, eq=False)
class StageArrival:
    """Activations being received. Valid until `depth` further receives have been posted."""

    _message: Tensor
    _work: dist.Work
    _layout: _Layout
    _num_tokens: int
    _expected: int
    """The trailer of a correct message."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """Return (hidden [N, H], status int64 [], on the device). On CUDA only the stream waits,
        not this thread.

        Raises:
            CommError: the neighbor is gone.
        """
        with communication("receiving from the previous stage"):
            self._work.wait()
        return self._gather(), self._status()

    def _gather(self) -> Tensor:
        layout, shape = self._layout, (self._num_tokens, self._layout.hidden_size)
        own = layout.slice_of(self._message, self._num_tokens)
        if layout.num_slices == 1:
            return own.view(shape)
        return layout.tp.all_gather_last_dim(own).view(shape)

    def _status(self) -> Tensor:
        """Return the trailer's status, or STATUS_MISMATCH, the largest status, if any other bit
        differs."""
        trailer = self._layout.trailer_of(self._message, self._num_tokens)
        return torch.bitwise_xor(trailer, self._expected).clamp_(max=STATUS_MISMATCH)


class StageOutbound:
    """Sends from `depth` rotating buffers; waits for a buffer's send only before its next use."""

    def __init__(self, link: Link, tp: TensorParallel, hop: HopShape) -> None:
        self._group = link.groups.to_next
        self._layout = _Layout(hop.hidden_size, hop.dtype, tp)
        self._generation = link.generation
        size = self._layout.message_bytes(hop.max_num_tokens)
        self._buffers = _MessageBuffers(self._group, size, hop.depth, hop.device)
        self._in_flight: deque[dist.Work] = deque()

    def send(self, hidden: Tensor, num_tokens: int, status: Tensor, seq: int) -> None:
        """Start to send hidden [:num_tokens, H] and status int64 [] of step seq; both may be
        overwritten at once.

        Raises:
            CommError: the neighbor is gone.
        """
        layout = self._layout
        if len(self._in_flight) == len(self._buffers):
            self._await_oldest()
        message = self._buffers.take()[: layout.message_bytes(num_tokens)]
        size = layout.slice_numel(num_tokens)
        first = layout.tp.rank * size if layout.num_slices > 1 else 0
        layout.slice_of(message, num_tokens).copy_(hidden.reshape(-1)[first : first + size])
        trailer = layout.trailer_of(message, num_tokens)
        torch.add(
            status, _identity(self._generation, seq, layout.shape_hash(num_tokens)), out=trailer
        )
        with communication("sending to the next stage"):
            work = dist.isend(message, group=self._group, group_dst=1, tag=seq % _TAG_RANGE)
        assert work is not None, "this rank is in the group"
        self._in_flight.append(work)

    def settle(self) -> None:
        """Wait until everything is sent: freeing a buffer earlier would lose its message.

        Raises:
            CommError: the neighbor is gone.
        """
        while self._in_flight:
            self._await_oldest()

    def _await_oldest(self) -> None:
        with communication("sending to the next stage"):
            self._in_flight.popleft().wait()
