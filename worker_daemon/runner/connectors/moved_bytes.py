"""Counts of the bytes of a connector's blocks that have moved one way, and of the time it took."""

from dataclasses import dataclass

from rpc_schema.moved_blocks import BlockTraffic


@dataclass(slots=True)
class MovedBytes:
    """Written by one thread at a time, read by any."""

    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count what has moved."""
        self.num_bytes += num_bytes
        self.seconds += seconds

    def status(self) -> BlockTraffic:
        """Return the present counts."""
        return BlockTraffic(num_bytes=self.num_bytes, num_us=int(self.seconds * 1e6))
