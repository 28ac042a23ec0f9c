"""Brings experts from peers into spare memory, beside the steps: a thread and a communicator of its
own for each move.

Bytes go through host memory and gloo. NCCL's kernels of two communicators can wait for each other
on a device, if ranks launch them in different orders.
"""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from rpc_schema.errors import StateError, TransferError
from worker_daemon.distributed.peer_channel import Messages, PeerChannel, PeerMeeting
from worker_daemon.layers.expert_slots import Move

BATCH_BYTES: Final = 32 << 20
"""Host memory for what a rank sends at a time, and as much for what it receives; at least one
expert."""
_DIGEST_BYTES: Final = 32


class ExpertMemory(NamedTuple):
    """A layer's experts on this rank, and the memory that others come to."""

    held: Sequence[Tensor]
    """uint8 [S, n] for each parameter: the contents of S slots."""
    spare: Sequence[Tensor]
    """Like held."""
    stream: torch.cuda.Stream | None
    """For the copies; None on the CPU. It has waited for what was written before the move."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert in all parameters."""
        return sum(each.shape[1] for each in self.held)


@dataclass(frozen=True, slots=True)
class SharedMove:
    """A move, as all ranks must know it."""

    layer: int
    moves: Sequence[Move]
    num_slots: int
    """S, of each rank."""
    version: int
    """Version of the weights."""

    def digest(self, expert_bytes: int) -> bytes:
        """Return _DIGEST_BYTES that only an equal move has."""
        parts = (self.layer, tuple(map(tuple, self.moves)), self.num_slots, self.version)
        return hashlib.sha256(repr((*parts, expert_bytes)).encode()).digest()

    def batches(self, most: int) -> Iterator[list[Move]]:
        """Divide the moves so that no rank sends or receives more than `most` experts in a batch,
        alike on every rank. Ranks take turns, so that all have something to do."""
        size, batch = self.num_slots, list[Move]()
        sent, received = Counter[int](), Counter[int]()
        for move in sorted(self.moves, key=lambda each: (each.target % size, each.target)):
            source, target = move.source // size, move.target // size
            if max(sent[source], received[target]) >= most:
                yield batch
                batch, sent, received = [], Counter(), Counter()
            batch.append(move)
            sent[source] += 1
            received[target] += 1
        if batch:
            yield batch


class ExpertExchange:
    """Made by the step thread, which may drop it at any time. Its thread copies from and to the
    device only while it holds the lock and is not dropped. So once it is dropped, weights may
    change, memory be unmapped and graphs be captured; it holds no device memory then."""

    def __init__(
        self,
        move: SharedMove,
        memory: ExpertMemory,
        meeting: PeerMeeting,
        timeout_s: float,
        lock: threading.Lock,
        on_end: Callable[[str], None],
    ) -> None:
        """timeout_s: limit on the whole exchange. on_end: called on the thread, with the lock held,
        once the weights are there (with an empty text) or will not come; never after drop()."""
        self._move, self._expert_bytes = move, memory.expert_bytes
        self._memory: ExpertMemory | None = memory
        """None once dropped."""
        self._rank, self._num_ranks = meeting.rank, meeting.size
        self._channel = PeerChannel(meeting)
        self._timeout_s = timeout_s
        self._until = time.monotonic() + timeout_s
        self._lock = lock
        self._on_end = on_end
        self.has_ended = False
        """Read and written with the lock held."""

    def start(self, connecting: threading.Lock) -> None:
        """Begin, on a thread. connecting: held while gloo connects the members."""
        run = threading.Thread(
            target=self._run, args=(connecting,), name="expert-move", daemon=True
        )
        run.start()

    def drop(self) -> None:
        """End it; nothing is copied from now on. With the lock held."""
        self._memory = None
        self._channel.abort()

    def _run(self, connecting: threading.Lock) -> None:
        try:
            self._channel.open(connecting)
            self._agree()
            self._transfer()
            self._end("")
            self._part()
        except Exception as error:  # whatever it is: a move must not end without a word
            self._end(str(error))
        finally:
            self._channel.leave()

    def _end(self, fault: str) -> None:
        with self._lock:
            if self._memory is not None:
                self.has_ended, self._memory = True, None
                self._on_end(fault)

    def _agree(self) -> None:
        """Raises TransferError: a peer is at another move, whose messages would not fit."""
        own = self._move.digest(self._expert_bytes)
        message = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        found = [(peer, torch.zeros(_DIGEST_BYTES, dtype=torch.uint8)) for peer in self._peers()]
        self._exchange([(peer, message) for peer in self._peers()], found)
        others = [peer for peer, digest in found if digest.numpy().tobytes() != own]
        if others:
            problem = f"members {others} move other experts, or have other weights"
            raise TransferError(problem, fix="rebalance again")

    def _transfer(self) -> None:
        most = max(1, BATCH_BYTES // self._expert_bytes)
        batches = list(self._move.batches(most))
        leaving, arriving = self._buffers(min(most, max(map(len, batches), default=0)))
        for batch in batches:
            sent = self._load(batch, leaving)
            received = [
                (source // self._move.num_slots, row)
                for (source, _), row in zip(self._coming(batch), arriving, strict=False)
            ]
            self._exchange(sent, received)
            self._store(batch, arriving)

    def _buffers(self, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return host memory for experts that leave and for those that arrive."""
        shape = (num_experts, self._expert_bytes)
        with self._copying() as memory:  # page-locking would spoil a graph that is captured
            pinned = memory.stream is not None
            leaving = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
            return leaving, torch.empty_like(leaving, pin_memory=pinned)

    def _load(self, batch: Sequence[Move], leaving: Tensor) -> Messages:
        """Copy the experts of a batch that peers get to host memory, and those that stay here to
        spare memory. Return the messages to send."""
        sent = list[tuple[int, Tensor]]()
        with self._copying() as memory:
            for source, target in batch:
                (giver, there), (taker, here) = (
                    divmod(slot, self._move.num_slots) for slot in (source, target)
                )
                if giver == taker == self._rank:
                    for held, free in zip(memory.held, memory.spare, strict=True):
                        free[here].copy_(held[there], non_blocking=True)
                elif giver == self._rank:
                    row = leaving[len(sent)]
                    for part, held in zip(_parts(row, memory.held), memory.held, strict=True):
                        part.copy_(held[there], non_blocking=True)
                    sent.append((taker, row))
        return sent

    def _store(self, batch: Sequence[Move], arrived: Tensor) -> None:
        """Copy the experts of a batch that peers have sent to spare memory."""
        with self._copying() as memory:
            for (_, target), row in zip(self._coming(batch), arrived, strict=False):
                for part, free in zip(_parts(row, memory.spare), memory.spare, strict=True):
                    free[target % self._move.num_slots].copy_(part, non_blocking=True)

    def _coming(self, batch: Sequence[Move]) -> list[Move]:
        """Return the moves from a peer to this rank."""
        size = self._move.num_slots
        return [each for each in batch if each.target // size == self._rank != each.source // size]

    @contextlib.contextmanager
    def _copying(self) -> Iterator[ExpertMemory]:
        """Hold the lock, and wait for the copies of the block. Raises StateError once dropped."""
        with self._lock:
            memory = self._memory
            if memory is None:
                raise StateError("the move was dropped")
            with (
                contextlib.nullcontext()
                if memory.stream is None
                else torch.cuda.stream(memory.stream)
            ):
                yield memory
            if memory.stream is not None:
                memory.stream.synchronize()

    def _part(self) -> None:
        """Wait until the peers have all of it: the end of a connection discards what is under
        way."""
        with contextlib.suppress(TransferError):  # each rank reports its own part
            byte = torch.zeros(1, dtype=torch.uint8)
            peers = self._peers()
            self._exchange([(each, byte) for each in peers], [(each, byte + 0) for each in peers])

    def _peers(self) -> list[int]:
        return [each for each in range(self._num_ranks) if each != self._rank]

    def _exchange(self, sent: Messages, received: Messages) -> None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            problem = f"the weights have not come within {self._timeout_s:g} s"
            raise TransferError(problem, fix="see which rank is slow, or allow more time")
        self._channel.exchange(sent, received, left_s)


def _parts(row: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    """Divide an expert's bytes, uint8 [n], among its parameters."""
    return torch.split(row, [each.shape[1] for each in parameters])
