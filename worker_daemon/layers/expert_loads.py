"""Counts the tokens routed to each expert of a stage's layers, so that experts can be rebalanced.

A counter is a model buffer rather than a weight: steps add to it on the device, weight updates and
sleep at any level keep it. Its memory is torch's own, a few KiB for a layer, so that it can be read
while the weights sleep.

Shapes: L layers with experts of this stage, E experts of the model.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class LayerLoad:
    """The counters of one layer."""

    counts: Tensor
    """int64 [E], on the device: the tokens routed to each expert, padding excluded. A view, which
    moves only when ExpertLoads.allocate is called."""


@dataclass(slots=True, eq=False)
class KnownLoads:
    """The counts that were last read from the device. Holds no device memory; any thread may read
    it."""

    by_layer: Mapping[int, bytes] = field(default_factory=dict)
    """By layer of the model: little-endian int64 [E]. Replaced, never changed. Empty if the stage
    has no layer with experts."""
    number: int = 0
    """The reading that they are from; later ones have higher numbers."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, number: int, by_layer: Mapping[int, bytes]) -> None:
        """Replace the counts, unless a later reading was published."""
        with self._lock:
            if number >= self.number:
                self.number, self.by_layer = number, by_layer

    def get(self) -> Mapping[int, bytes]:
        """Return by_layer now."""
        return self.by_layer


class ExpertLoads:
    """The counters of all layers of a stage. Used on the step thread, except `known` and the
    function that start_reading returns; freed with the stage."""

    def __init__(self) -> None:
        self.known = KnownLoads()
        """Updated by allocate, reset and readings: by start_reading itself on the CPU, otherwise by
        the function that it returns."""
        self._layers: dict[int, LayerLoad] = {}
        self._all = torch.zeros(0, dtype=torch.int64)
        """int64, on the device: the counters of all layers, one layer after another."""
        self._num_read = 0
        """Number of readings so far, resets included."""
        self._host = self._all
        """The same on the host, page-locked: receives all readings."""
        self._number = self._all
        """int64 [1], on the device: the number of the last reading."""
        self._copied = self._all
        """int64 [1] on the host, page-locked: the number of the last reading that has arrived."""
        self._copy_stream: torch.cuda.Stream | None = None
        """The stream that copies counters to the host; None on the CPU."""

    def add(self, layer: int, num_experts: int) -> LayerLoad:
        """Return the counters of another layer, without memory before allocate."""
        load = LayerLoad(torch.empty(num_experts, dtype=torch.int64, device="meta"))
        self._layers[layer] = load
        return load

    @property
    def num_bytes(self) -> int:
        """Device memory of all counters."""
        return sum(load.counts.nbytes for load in self._layers.values())

    def allocate(self, device: torch.device) -> None:
        """Give zeroed memory to all counters. Raises torch.OutOfMemoryError."""
        sizes = [load.counts.numel() for load in self._layers.values()]
        self._all = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        parts = torch.split(self._all, sizes)
        for load, counts in zip(self._layers.values(), parts, strict=True):
            load.counts = counts
        is_cuda = device.type == "cuda" and bool(sizes)
        self._host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_cuda)
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._copied = torch.zeros(1, dtype=torch.int64, pin_memory=is_cuda)
        self._copy_stream = None
        if is_cuda:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for counters in (self._all, self._number):
                counters.record_stream(self._copy_stream)
            self._await_stream()
        self._publish_zeros()

    def reset(self) -> None:
        """Set all counters to 0: the weights are those of another checkpoint."""
        self._all.zero_()
        self._await_stream()
        self._publish_zeros()

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the counters at the end: for steps that no driver has sent."""
        before = self._all.clone()
        try:
            yield
        finally:
            self._all.copy_(before)
            self._await_stream()

    def start_reading(self) -> Callable[[], bool]:
        """Start to copy the counters to the host; they may include a part of the steps that still
        run. Return a function that any thread may call, and that asks the device nothing: it
        returns False while the copy runs, and then True, with `known` up to date."""
        self._num_read += 1
        number = self._num_read
        if self._copy_stream is None:
            self.known.publish(number, _by_layer(self._all, self._sizes))
            return lambda: True
        with torch.cuda.stream(self._copy_stream):
            self._host.copy_(self._all, non_blocking=True)
            # After it in the stream, so that the counts are there when the number is.
            self._number.fill_(number)
            self._copied.copy_(self._number, non_blocking=True)
        known, host, copied, layers = self.known, self._host, self._copied, self._sizes

        def has_arrived() -> bool:
            if int(copied[0]) < number:
                return False
            known.publish(number, _by_layer(host, layers))  # a later copy may run: it counts more
            return True

        return has_arrived

    def _publish_zeros(self) -> None:
        self._num_read += 1
        zeros = torch.zeros(self._all.shape, dtype=torch.int64)
        self.known.publish(self._num_read, _by_layer(zeros, self._sizes))

    def _await_stream(self) -> None:
        """Let later readings wait for what the current stream has queued: they must not see counts
        that are about to be replaced."""
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._all.device))

    @property
    def _sizes(self) -> Mapping[int, int]:
        """The number of experts of each layer."""
        return {layer: load.counts.numel() for layer, load in self._layers.items()}


def _by_layer(counts: Tensor, sizes: Mapping[int, int]) -> Mapping[int, bytes]:
    """Return counts int64 [L * E] on the host as KnownLoads has them. sizes: E of each layer."""
    parts = torch.split(counts, list(sizes.values()))
    return {
        layer: part.numpy().astype("<i8").tobytes()
        for layer, part in zip(sizes, parts, strict=True)
    }
