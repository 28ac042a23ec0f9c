"""Stages host values for the device, and sampled tokens for the host, without a copy call: both are
in page-locked memory, which the step's own kernels read and write.

Slots are used in turn. The host counts the steps that it launched, the device those that it took. A
slot is filled again once the device has taken its values and the host has read its tokens.
"""

import threading
import time
from collections.abc import Iterable
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.runner.step_layout import StepColumns, StepShape, packed_size, split_columns

_POLL_S: Final = 50e-6


class Delivery(Protocol):
    """Delivers a step's tokens to the host."""

    def expect(self, count: int, num_seqs: int = 0) -> "Delivered":
        """Announce that the first `count` tokens that the step stores will be read, and the first
        num_seqs counts. Called once, when the step is launched."""


class Packed:
    """One step's buffer: fill the host's columns, then take them over. This class is for the CPU,
    where the host's buffer is also the device's."""

    delivery: Delivery | None = None
    """The place that `store` writes the step's tokens to; None if they are copied."""

    def __init__(self, shape: StepShape, values: Int32s, on_device: Tensor) -> None:
        """values, on_device: int32 buffers on either side, of the packed size or more."""
        self.holds: object = None
        """Set by its user: the step for which the columns were last filled with these sizes; None
        if their content is unknown."""
        self.host: StepColumns[Int32s] = split_columns(shape, lambda a, b: values[a:b])
        """Columns to fill: all of them, unless `holds` says what they hold already."""
        self.columns: StepColumns[Tensor] = split_columns(shape, lambda a, b: on_device[a:b])
        """The device's columns: valid once taken, until the next step's are."""

    def take(self) -> None:
        """Launch the kernel that copies the current step's columns to the device. May be
        captured."""

    def taken(self) -> None:
        """Record that a take was launched for this step, alone or in a graph. Until then the next
        step gets the same buffer."""


class HostStaging:
    """Provides one packed buffer per step, on the CPU."""

    _last: Packed
    """The newest buffer, reused while the shape stays the same. Unset before the first."""

    def __init__(self) -> None:
        self._shape: StepShape | None = None

    def open(self, shape: StepShape) -> Packed:
        """Return a buffer for columns of these sizes."""
        if self._shape != shape:
            values = np.empty(packed_size(shape), np.int32)
            self._shape, self._last = shape, Packed(shape, values, torch.from_numpy(values))
        return self._last

    def keep(self, shapes: Iterable[StepShape]) -> None:
        """Create the views of these shapes in advance, because they recur."""

    def store(self, last_sampled: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        """last_sampled[rows] = token_ids: int64 [S], int32 [R], int64 [R]; and deliver them to the
        host, where the step has a delivery. May be captured."""
        last_sampled[rows.long()] = token_ids

    def store_counts(self, counts: Tensor) -> None:
        """Deliver the number of tokens that each sequence of a step gains, int32 [Q], to the host,
        where the step has a delivery. May be captured."""


class CudaStaging:
    """The staging for CUDA: rings of page-locked slots, and one device buffer at a fixed address,
    which captured graphs read.

    Steps run on one stream, so the device buffer is overwritten only after the step that read it.
    """

    def __init__(
        self, device: torch.device, capacity: int, width: int, depth: int, *, delivers: bool
    ) -> None:
        """capacity: int32 values of the largest step; width: the largest number of tokens that a
        step stores, and at least that of its counts; depth: steps in flight, and the one being
        built; delivers: True if steps store their tokens.

        Tests use it on the CPU too, with Triton's interpreter.
        """
        # Imports Triton, which a CPU daemon does not need.
        from worker_daemon.kernels import step_buffers

        self._kernels = step_buffers
        capacity = -(-capacity // 4) * 4
        locked = device.type == "cuda"
        self.on_device = torch.zeros(capacity, dtype=torch.int32, device=device)
        self.ring = torch.zeros((depth, capacity), dtype=torch.int32, pin_memory=locked)
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._results = torch.zeros((depth, width), dtype=torch.int64, pin_memory=locked)
        self._counts = torch.zeros((depth, width), dtype=torch.int32, pin_memory=locked)
        self._taken_by_device = torch.zeros(1, dtype=torch.int64, pin_memory=locked)
        taken: Int64s = self._taken_by_device.numpy()
        self._num_taken = taken.data  # whose elements are Python numbers
        self._num_launched = 0
        tokens: Int64s = self._results.numpy()
        counts: Int32s = self._counts.numpy()
        make_event = _StreamEvent if locked else _HostEvent
        self._slots = [_Slot(self, i, tokens[i], counts[i], make_event()) for i in range(depth)]
        self.delivers = delivers

    def open(self, shape: StepShape) -> Packed:
        """Return the next slot's views; waits until the device has taken the slot's former
        values."""
        depth = len(self._slots)
        if self._num_taken[0] <= self._num_launched - depth:
            self._await_taken(self._num_launched - depth)
        return self._slots[self._num_launched % depth].open(shape)

    def keep(self, shapes: Iterable[StepShape]) -> None:
        for shape in shapes:
            for slot in self._slots:
                slot.keep(shape)

    def store(self, last_sampled: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        """See HostStaging; R is at most the width."""
        self._kernels.store_tokens(last_sampled, rows, token_ids, self._results, self.turn)

    def store_counts(self, counts: Tensor) -> None:
        """See HostStaging; Q is at most the width."""
        self._kernels.store_counts(counts, self._counts, self.turn)

    def take(self, size: int) -> None:
        """Launch the copy of the next slot's first `size` values to the device."""
        self._kernels.take_columns(
            self.on_device, self.ring, self.turn, self._taken_by_device, size
        )

    def taken(self) -> None:
        """Count a launched take."""
        self._num_launched += 1

    def _await_taken(self, index: int) -> None:
        """Wait until the device has taken step `index`. Raises RuntimeError if it is lost."""
        stream = torch.cuda.current_stream()
        while self._num_taken[0] <= index:
            stream.query()
            time.sleep(_POLL_S)


Staging: TypeAlias = HostStaging | CudaStaging


class OpenStaging(Protocol):
    """Opens the staging of one runner on its device."""

    def __call__(self, capacity: int, width: int, depth: int, *, delivers: bool) -> Staging:
        """See CudaStaging."""


class _HostEvent:
    """A point of the work that was launched, recorded again for each use of a slot. Work on the
    host is done when it is launched."""

    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class _StreamEvent(_HostEvent):
    """On the stream that is current at construction. Finding that out takes longer than the rest
    of recording."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream()

    def record(self) -> None:
        self._event.record(self._stream)

    def synchronize(self) -> None:
        self._event.synchronize()


class _Slot:
    """One slot of both rings, and its views by shape."""

    def __init__(
        self,
        staging: CudaStaging,
        index: int,
        tokens: Int64s,
        counts: Int32s,
        stored: _HostEvent,
    ) -> None:
        self.staging = staging
        self.values: Int32s = staging.ring[index].numpy()
        self._tokens = tokens
        self._counts = counts
        self._stored = stored
        self._expected: Delivered | None = None
        self._kept: dict[StepShape, _CudaPacked] = {}
        self._last: _CudaPacked | None = None

    def open(self, shape: StepShape) -> Packed:
        """Return the views for a shape, once the slot's delivered tokens are read."""
        if self._expected is not None:
            self._expected.wait()
            self._expected = None
        packed = self._kept.get(shape) or _CudaPacked(self, shape)
        if self._last is not packed:
            if self._last is not None:
                self._last.holds = None  # its columns will be overwritten
            self._last = packed
        return packed

    def keep(self, shape: StepShape) -> None:
        """Create a shape's views now."""
        self._kept[shape] = _CudaPacked(self, shape)

    def expect(self, count: int, num_seqs: int = 0) -> "Delivered":
        """See Delivery."""
        self._stored.record()
        self._expected = Delivered(self._tokens[:count], self._counts[:num_seqs], self._stored)
        return self._expected


class Delivered:
    """Tokens that the device writes to the host. The first of two threads reads them: the one that
    wants them, or the one that reuses their place."""

    def __init__(self, tokens: Int64s, counts: Int32s, stored: _HostEvent) -> None:
        self._tokens = tokens
        self.counts = counts
        """Valid after `wait`: int32 [num_seqs], the number of tokens that each sequence gains of
        those that it has sampled; [0] if it gains all."""
        self._stored = stored
        self._lock = threading.Lock()
        self._raw: bytes | None = None

    def wait(self) -> bytes:
        """Wait for the tokens and return them, int32 little-endian.

        Raises:
            RuntimeError: the device is lost.
        """
        with self._lock:
            if self._raw is None:
                self._stored.synchronize()
                if self.counts.size:
                    self.counts = self.counts.copy()
                self._raw = self._tokens.astype("<i4").tobytes()
            return self._raw


class _CudaPacked(Packed):
    def __init__(self, slot: _Slot, shape: StepShape) -> None:
        staging = slot.staging
        super().__init__(shape, slot.values, staging.on_device)
        self.delivery = slot if staging.delivers else None
        self.taken = staging.taken  # type: ignore[method-assign]  # a step saves a call
        self._staging = staging
        self._size = packed_size(shape)

    def take(self) -> None:
        self._staging.take(self._size)
