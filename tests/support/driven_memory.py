"""A simulated device memory that the test controls byte by byte."""

from worker_daemon.device.memory import (
    MemorySnapshot,
    device_bytes_taken,
    foreign_changes,
    request_memory,
)

MIB = 1 << 20
GIB = 1 << 30


class DrivenMemory:
    """A MemorySource with the test's figures."""

    def __init__(self, total=80 * GIB, *, names_others=True):
        """names_others: memory of other processes is known."""
        self.total = total
        self.names_others = names_others
        self.others = {}
        self.context = 0
        self.tensors = 0
        self.cached = 0
        self.pinned = 0
        self.lag = 0
        """Bytes by which the driver's figure of free memory lags."""
        self.peak = self.reserved_peak = 0
        self.num_resets = 0

    # What the test does.

    def take(self, num_bytes):
        """Allocate this many bytes in tensors, from the cache first."""
        self.tensors += num_bytes
        self.cached = max(0, self.cached - num_bytes)
        self._note_peak()

    def give(self, num_bytes):
        self.tensors -= num_bytes

    def step(self, num_bytes, gaps=0):
        """Allocate this many bytes temporarily; the allocator keeps them, plus gaps."""
        self.take(num_bytes)
        self.cached += gaps
        self._note_peak()
        self.tensors -= num_bytes
        self.cached += num_bytes

    def _note_peak(self):
        self.peak = max(self.peak, self.tensors)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    @property
    def reserved(self):
        return self.tensors + self.cached + self.pinned

    @property
    def free(self):
        return self.total - sum(self.others.values()) - self.context - self.reserved + self.lag

    # What a worker sees.

    def snapshot(self):
        return MemorySnapshot(
            total=self.total,
            free=self.free,
            allocated=self.tensors,
            peak=self.peak,
            reserved=self.reserved,
            reserved_peak=self.reserved_peak,
            others=dict(self.others) if self.names_others else None,
        )

    def reset_peak(self):
        self.num_resets += 1
        self.cached = 0
        self.peak, self.reserved_peak = self.tensors, self.reserved

    def budget(self, baseline, utilization):
        return request_memory(baseline, utilization)

    def limit_kv_cache(self, available):
        return available

    def own_bytes(self, now):
        return now.total - now.free - sum((now.others or {}).values())

    def taken_since(self, before, now):
        return device_bytes_taken(before, now)

    def foreign_changes(self, before, now):
        return foreign_changes(before, now)
