"""Counts the tokens routed to each expert of a stage's layers, so that experts can be rebalanced.

A counter is a model buffer rather than a weight: steps add to it on the device, weight updates and
sleep at any level keep it. Its memory is torch's own, a few KiB for a layer, so that it can be read
while the weights sleep.

Shapes: L layers with experts of this stage, E experts of the model.
"""

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
        self._copy_stream = None
        if is_cuda:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._all.record_stream(self._copy_stream)
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
        run. Return a function that any thread may call: it returns False while the copy runs, and
        then True, with `known` up to date."""
        self._num_read += 1
        number = self._num_read
        if self._copy_stream is None:
            self._publish(number, self._all)
            return lambda: True
        with torch.cuda.stream(self._copy_stream):
            self._host.copy_(self._all, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._copy_stream)

        def has_arrived() -> bool:
            if not copied.query():  # type: ignore[no-untyped-call]
                return False
            self._publish(number, self._host)  # a later copy may run: its counts are larger
            return True

        return has_arrived

    def _publish_zeros(self) -> None:
        self._num_read += 1
        self._publish(self._num_read, torch.zeros(self._all.shape, dtype=torch.int64))

    def _await_stream(self) -> None:
        """Let later readings wait for what the current stream has queued: they must not see counts
        that are about to be replaced."""
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._all.device))

    def _publish(self, number: int, counts: Tensor) -> None:
        """Publish counts int64 [L * E] on the host, unless a later reading was published."""
        if number < self.known.number:
            return
        sizes = [load.counts.numel() for load in self._layers.values()]
        parts = torch.split(counts, sizes)
        self.known.number = number
        self.known.by_layer = {
            layer: part.numpy().astype("<i8").tobytes()
            for layer, part in zip(self._layers, parts, strict=True)
        }
