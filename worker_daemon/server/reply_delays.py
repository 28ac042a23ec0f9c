"""How long the last results took from the host to the driver's socket. Knows no socket and no
step."""

from collections import deque
from typing import Final

from rpc_schema.lifecycle import ReplyDelay

MAX_DELAYS: Final = 1024


class ReplyDelays:
    """The delays of the last MAX_DELAYS results. Written by one thread at a time; any thread may
    ask for the summary, which costs what a step need not pay."""

    __slots__ = ("_delays_ns",)

    def __init__(self) -> None:
        self._delays_ns: deque[int] = deque(maxlen=MAX_DELAYS)

    def add(self, delay_ns: int) -> None:
        """Note one delay, in nanoseconds."""
        self._delays_ns.append(delay_ns)

    def clear(self) -> None:
        """Forget all: another driver begins."""
        self._delays_ns.clear()

    def summary(self) -> ReplyDelay:
        """Return median and 99th percentile, each the delay at its rank (no interpolation)."""
        ordered = sorted(self._delays_ns.copy())
        if not ordered:
            return ReplyDelay(num_replies=0, p50_us=0.0, p99_us=0.0)
        return ReplyDelay(
            num_replies=len(ordered),
            p50_us=_at_rank(ordered, 50) / 1000,
            p99_us=_at_rank(ordered, 99) / 1000,
        )


def _at_rank(ordered: list[int], percent: int) -> int:
    """The smallest value that `percent` of all do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]
